"""Plans what the workers of a prefill node compute, send and fetch.

It owns the held attempts and their pages. The calling loop neither computes nor sends: workers do, through an executor,
and report.
"""

import time

import structlog

from base.device import DeviceFailed
from base.metrics import Metrics
from base.tracing import NO_TRACER, Tracer
from control.messages import AttemptId, FetchGrant, FetchRefused, Peer, PrefillRequest, Progress, Quiesced
from engine.chunked import ChunkedPrefill
from prefill_node.attempt import HeldAttempt, HeldState, Update
from prefill_node.config import FetchPolicy
from prefill_node.dispatch import Dispatch, Transfer
from prefill_node.offer import Destinations, Offer
from prefill_node.orders import LayersRead, Order, Report, StepEnded, TransferReport
from prefill_node.prefixes import PrefixFetches
from prefill_node.steps import PrefillSteps
from prefill_node.telemetry import record_computed, record_sent, set_gauges
from ranks.barrier import GroupFailed
from ranks.executor import Executor

log = structlog.get_logger(__name__)

MAX_DECODE_NODES = 64
"""That have attempts here: each takes threads, buffers and connections."""


class PrefillPlanner:
    """One loop calls it. It holds an attempt from `start` until the endpoint has told its end (`forget`)."""

    def __init__(
        self,
        prefill: ChunkedPrefill[HeldAttempt],
        executor: Executor[Order, Report],
        offer: Offer,
        metrics: Metrics,
        transfer_timeout: float,
        fetch_policy: FetchPolicy = "auto",
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """transfer_timeout: seconds that an attempt's transfer may go on after its computation. fetch_policy: for
        prefixes that decode nodes have."""
        self.held: dict[AttemptId, HeldAttempt] = {}
        self.has_failed = False
        """Whether its device, or another rank, does not work any more: then it starts nothing."""
        self.sent_bytes = 0
        """Written to decode nodes so far."""
        self._prefill = prefill
        self._executor = executor
        self._offer = offer
        self._transfer_timeout = transfer_timeout
        self._metrics = metrics
        self._tracer = tracer
        self._destinations = Destinations()
        self._updates: list[Update] = []
        self._fetches = PrefixFetches(
            fetch_policy,
            prefill,
            self.held,
            executor.world_size,
            offer.transports,
            metrics,
            self._updates.append,
        )
        self._dispatch = Dispatch(executor)
        self._steps = PrefillSteps(prefill, self._dispatch, self._fetches, metrics)

    # --- for the endpoint ---

    def rejection_reason(self, decode: Peer, request: PrefillRequest) -> str | None:
        """Why the node cannot serve a request, naming both values, or None."""
        reason = self._offer.rejection_reason(request) or self._destinations.rejection_reason(
            decode, request.destination
        )
        served = self._dispatch.served
        if reason is None and decode not in served and len(served) >= MAX_DECODE_NODES:
            return "this node sends to as many decode nodes as it can"
        return reason

    def start(self, decode: Peer, request: PrefillRequest) -> None:
        """Compute the KV of a request that was not rejected, and write it where the request says."""
        self._dispatch.serve(self._dispatch.served | {decode})
        attempt = self.held[request.attempt] = HeldAttempt.of(
            request, decode, self._tracer.join("attempt", request.traceparent)
        )
        self._prefill.add(attempt)

    def stop(self, attempt: HeldAttempt, reason: str | None = None) -> bool:
        """Compute and write no more of an attempt. PrefillFailed with the reason follows; without one, Quiesced.

        False if it was stopped before; it may have ended, with an update that `poll` has yet to return. A second call
        without a reason takes the reason back.
        """
        if attempt.state in (HeldState.STOPPING, HeldState.ENDED):
            attempt.failure = attempt.failure if reason is not None else None
            return False
        attempt.leave_step()
        was = attempt.state
        attempt.move(HeldState.STOPPING)
        attempt.failure = reason
        self._prefill.forget(attempt)
        self._dispatch.cancel(tuple(attempt.in_flight))
        self._fetches.stopped(attempt, was)
        if reason is not None and attempt.in_flight:
            # So the decode node can ask another prefill node at once.
            self._updates.append(attempt.failed(reason))
        self._advance(attempt)
        return True

    def release(self, attempt: HeldAttempt) -> bool:
        """The decode node has the KV of an attempt. False, and nothing changes, before `PrefillDone`."""
        if attempt.state is not HeldState.SENT:
            return False
        self._end(attempt)
        return True

    def forget(self, attempt: HeldAttempt) -> None:
        """The decode node was told the end of an attempt that has ended."""
        assert attempt.state is HeldState.ENDED
        del self.held[attempt.id]

    def fetch_answered(self, answer: FetchGrant | FetchRefused) -> None:
        """The decode node lends what `FetchRequest` has asked for, or does not. The attempt may have ended."""
        fetch = self._fetches.answered(answer)
        if fetch is not None and isinstance(answer, FetchGrant):
            fetch.work, fetch.bounds = self._dispatch.read(fetch.by, answer, self._steps.ended)

    def poll(self) -> list[Update]:
        """Do what can be done now, and return what has happened since the last call. Never waits.

        To be called in every turn of the loop, which reports wake. Raises DeviceFailed if the device does not work any
        more, and GroupFailed if another rank of this node does not; each once.
        """
        try:
            if not self.has_failed:
                self._executor.check()
            for rank, report in self._executor.poll():
                self._on_report(rank, report)
        except (DeviceFailed, GroupFailed):
            self.has_failed = True
            raise
        now = time.monotonic()
        self._stop_late_transfers(now)
        self._dispatch.cancel(self._fetches.give_up_late(now))
        if not self.has_failed:
            self._start_step()
        updates = self._updates.copy()
        self._updates.clear()
        return updates

    def progress(self, attempts: tuple[AttemptId, ...]) -> Progress:
        """The progress of those of these attempts that are held."""
        computed = tuple((attempt, self.held[attempt].computed) for attempt in attempts if attempt in self.held)
        return Progress(computed=computed, current_pass=None if self._steps.is_idle else self._steps.started)

    def keep_connected(self, decode_nodes: set[Peer]) -> None:
        """Close the connections to other decode nodes, once nothing waits to be sent there."""
        self._dispatch.serve(decode_nodes)

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date for a scrape. Any thread may call it."""
        set_gauges(self._metrics, self._prefill, list(self.held.values()))

    # --- steps ---

    def _start_step(self) -> None:
        """Start the next step, if none is under way, and send what was found in the cache."""
        for attempt in self._prefill.start_waiting():
            self._fetches.consider(attempt)
        step = None
        if self._steps.is_idle:
            if to_gather := self._fetches.take_read():
                self._steps.gather(to_gather)
            else:
                self._fetches.join()
                step = self._prefill.plan()
        for attempt in self.held.values():
            if attempt.computed and attempt.state is HeldState.COMPUTING:
                self._advance(attempt)
        if step is not None:
            self._steps.compute(step)

    def _on_step_ended(self, ended: StepEnded) -> None:
        """Raises DeviceFailed and GroupFailed."""
        if ended.error is not None and not self.has_failed:
            self._executor.step_failed(ended.error)
        for attempt in self._steps.end(ended):
            if ended.error is not None:
                self.stop(attempt, ended.error)
            self._advance(attempt)
        if ended.device_failed is not None:
            raise ended.device_failed

    # --- transfers ---

    def _on_report(self, rank: int, report: Report) -> None:
        match report:
            case StepEnded():
                self._on_step_ended(report)
            case LayersRead():
                attempt = self._dispatch.attempt_of(report.work)
                if attempt is not None and attempt.fetch is not None:
                    attempt.fetch.layers = report
            case TransferReport():
                if (ended := self._dispatch.block_ended(rank, report)) is not None:
                    self._on_transferred(*ended)

    def _on_transferred(self, transfer: Transfer, report: TransferReport) -> None:
        attempt = transfer.attempt
        if report.in_flight:
            log.error(
                f"nobody knows whether a {'read' if transfer.is_read else 'write'} has ended: its pages, and its slots "
                "at the decode node, are free when this process ends; restart it",
                decode=attempt.decode.address,
                **attempt.id.log_fields,
            )
        attempt.lingering |= report.lingering
        if not report.in_flight and not transfer.is_read:
            attempt.in_flight.discard(report.work)
        if transfer.is_read:
            if report.in_flight:
                self.stop(attempt, f"fetch failed: {report.error}")
            for start, stop, step in self._fetches.on_read(attempt, report):
                self._dispatch.send(attempt, start, stop, step)
        elif report.error is None:
            self.sent_bytes += report.num_bytes
            self._metrics.transfer_bytes.inc(report.num_bytes)
            self._metrics.transfer_descriptors.inc(report.num_descriptors)
            self._metrics.transfer_seconds.observe(report.seconds())
            if chunk_done := attempt.landed(transfer.stop, report):
                # The decode node can verify these checksums while later chunks compute.
                self._updates.append(chunk_done)
        elif attempt.state is not HeldState.STOPPING:
            self._metrics.transfer_failures.labels("write").inc()
            self.stop(attempt, f"transfer failed: {report.error}")
        self._advance(attempt)

    # --- attempts ---

    def _advance(self, attempt: HeldAttempt) -> None:
        """Send what an attempt has in the cache, and say so once all was sent, or once it has stopped."""
        if attempt.state is HeldState.COMPUTING:
            self._send_cached(attempt)
            if not attempt.remaining:
                attempt.computed_at = time.monotonic()
                attempt.move(HeldState.SENDING)
                record_computed(attempt, self._metrics)
        if attempt.in_flight:
            return
        if attempt.state is HeldState.STOPPING:
            self._end(attempt)
            if attempt.failure is None:
                self._updates.append(Quiesced(attempt=attempt.id, lingering=attempt.lingering))
            else:
                self._updates.append(attempt.failed(attempt.failure))
        elif attempt.state is HeldState.SENDING:
            attempt.move(HeldState.SENT)
            self._updates.append(attempt.done())
            record_sent(attempt, self._metrics)

    def _send_cached(self, attempt: HeldAttempt) -> None:
        """In pieces of the size of chunks, so that the decode node verifies one while the next is sent."""
        first, each = max(attempt.handed, attempt.start), self._prefill.chunk_size
        for start in range(first, attempt.computed, each):
            self._dispatch.send(attempt, start, min(start + each, attempt.computed))
        attempt.handed = max(attempt.handed, attempt.computed)

    def _end(self, attempt: HeldAttempt) -> None:
        """The one place where an attempt's pages are released. Raises SlotAccountingError if any has leaked."""
        attempt.move(HeldState.ENDED)
        attempt.span.fail(attempt.failure)
        attempt.span.end()
        self._prefill.release(attempt)
        if all(held.state is HeldState.ENDED for held in self.held.values()):
            self._prefill.pages.check_idle()

    def _stop_late_transfers(self, now: float) -> None:
        for attempt in list(self.held.values()):
            if attempt.state is HeldState.SENDING and now - attempt.computed_at > self._transfer_timeout:
                self._metrics.transfer_failures.labels("timeout").inc()
                self.stop(attempt, f"transfer took longer than {self._transfer_timeout:g} s")
