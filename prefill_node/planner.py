"""Plans what the workers of a prefill node compute, send and fetch, and counts what they report.

It owns the held attempts and their pages. The calling loop neither computes nor sends: workers do, through an executor,
and report. A gather is a step, too.
"""

import time
from dataclasses import dataclass

import structlog

from base.metrics import Metrics
from base.tracing import NO_TRACER, Tracer
from control.messages import AttemptId, FetchGrant, FetchRefused, Peer, PrefillRequest, Progress, Quiesced
from engine.chunked import ChunkedPrefill, PrefillStep
from engine.device import DeviceFailed
from prefill_node.attempt import HeldAttempt, HeldState, Update
from prefill_node.config import FetchPolicy
from prefill_node.dispatch import Dispatch, Transfer
from prefill_node.offer import Destinations, Offer
from prefill_node.orders import End, LayersRead, Order, Report, StepEnded, TransferReport
from prefill_node.prefixes import PrefixFetches
from prefill_node.spans import record_chunk, record_compute, record_transfer
from ranks.barrier import GroupFailed
from ranks.executor import Executor

log = structlog.get_logger(__name__)

MAX_DECODE_NODES = 64
"""That have attempts here: each takes threads, buffers and connections."""
_LABELS = sorted({state.label for state in HeldState} - {HeldState.ENDED.label})


@dataclass(frozen=True)
class _Running:
    """The step that is under way, or the attempts whose prefixes are gathered."""

    number: int
    started_at: float
    step: PrefillStep[HeldAttempt]
    gathered: list[HeldAttempt]
    may_wait: bool
    """Whether it waits for layers that are read: then it does not tell what computing takes."""


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
        self._running: _Running | None = None
        self._steps_ended = 0
        self._passes = 0
        """Steps that were started."""

    # --- for the endpoint ---

    @property
    def queued_tokens(self) -> int:
        """Tokens of held attempts that are not computed yet."""
        return self._prefill.queued_tokens

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
            fetch.work, fetch.bounds = self._dispatch.read(fetch.by, answer, self._steps_ended)

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
        return Progress(computed=computed, current_pass=None if self._running is None else self._passes)

    def keep_connected(self, decode_nodes: set[Peer]) -> None:
        """Close the connections to other decode nodes, once nothing waits to be sent there."""
        self._dispatch.serve(decode_nodes)

    def leave(self) -> None:
        """The node ends in peace: nothing is in flight."""
        self._executor.leave(End())

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date for a scrape. Any thread may call it."""
        pool, free, cached = self._prefill.pool, self._prefill.pool.free_pages, self._prefill.pages.cached_pages
        self._metrics.prefill_pages.labels("free").set(free)
        self._metrics.prefill_pages.labels("cached").set(cached)
        used = max(0, pool.num_pages - free - cached)
        self._metrics.prefill_pages.labels("used").set(used)
        self._metrics.kv_usage.set(used / pool.num_pages)
        self._metrics.prompt_tokens_waiting.set(self.queued_tokens)
        labels = [attempt.state.label for attempt in list(self.held.values())]
        for label in _LABELS:
            self._metrics.requests.labels(label).set(labels.count(label))

    # --- steps ---

    def _start_step(self) -> None:
        """Start the next step, if none is under way, and send what was found in the cache."""
        for attempt in self._prefill.start_waiting():
            self._fetches.consider(attempt)
        step = None
        if self._running is None:
            if to_gather := self._fetches.take_read():
                self._run(PrefillStep([]), to_gather)
            else:
                self._fetches.join()
                step = self._prefill.plan()
        for attempt in self.held.values():
            if attempt.state is HeldState.COMPUTING:
                self._advance(attempt)
        if step is not None:
            self._run(step, [])

    def _run(self, step: PrefillStep[HeldAttempt], gathered: list[HeldAttempt]) -> None:
        """Have the ranks compute a step, or exchange the prefixes of attempts."""
        may_wait = any(attempt.state is HeldState.JOINED for attempt, _ in step.chunks)
        if gathered:
            number = self._dispatch.start_gather(list(map(self._fetches.divided, gathered)))
        else:
            number = self._dispatch.start_step(step)
        for attempt, _ in step.chunks:
            attempt.begin()
        self._running = _Running(number, time.monotonic(), step, gathered, may_wait)
        self._passes += 1

    def _on_step_ended(self, ended: StepEnded) -> None:
        """Raises DeviceFailed and GroupFailed."""
        running, self._running = self._running, None
        assert running is not None
        if ended.error is not None and not self.has_failed:
            self._executor.step_failed(ended.error)
        self._steps_ended += 1
        for attempt in running.gathered:
            self._fetches.on_gathered(attempt)
            self._advance(attempt)
        chunks = running.step.chunks
        # A chunk after a prefix that did not come was computed where the attempt does not stand any more.
        void = {each for at, (each, chunk) in enumerate(chunks) if at in ended.void or each.computed != chunk.start}
        if ended.error is None:
            self._prefill.complete(running.step, without=void)
            if chunks and not running.may_wait:
                ranges = [(chunk.start, chunk.stop) for _, chunk in chunks]
                self._fetches.compute_cost.observe(ranges, time.monotonic() - running.started_at)
        for at, (attempt, chunk) in enumerate(chunks):
            attempt.in_flight.discard(ended.number)
            record_chunk(attempt, chunk, running.step, running.started_at, ended.error, attempt in void)
            if ended.error is not None:
                self.stop(attempt, ended.error)
            elif attempt in void:
                log.info("step is void: the prefix did not come in time", **attempt.id.log_fields)
                self._fetches.on_void(attempt)
            else:
                self._metrics.prompt_tokens.inc(chunk.stop - chunk.start)
                if (found := ended.prompt_logprobs.get(at)) is not None:
                    attempt.unsent_logprobs.append(found)
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
                self._metrics.prefix_cache_queries.labels("prefill").inc(attempt.num_tokens)
                self._metrics.prefix_cache_hits.labels("prefill").inc(attempt.cached)
                record_compute(attempt)
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
            self._note_stages(attempt)
            say = log.info if attempt.lingering else log.debug
            say(
                "sent",
                cached=attempt.cached,
                fetched=attempt.fetched,
                bytes=attempt.num_bytes,
                descriptors=attempt.num_descriptors,
                seconds=round(attempt.seconds, 4),
                after_compute=round(time.monotonic() - attempt.computed_at, 4),
                lingering=attempt.lingering,
                **attempt.id.log_fields,
            )

    def _note_stages(self, attempt: HeldAttempt) -> None:
        begun = attempt.begun_at or attempt.computed_at
        self._metrics.note_stages(
            attempt.num_tokens,
            prefill_queue=begun - attempt.arrived_at,
            prefill=attempt.computed_at - begun,
            transfer=time.monotonic() - attempt.computed_at,
        )
        record_transfer(attempt)

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
