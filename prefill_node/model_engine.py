"""The prefill engine of this project: computes chunks with its model and sends them layer by layer."""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from base.metrics import Metrics
from control.messages import (
    AttemptId,
    FetchGrant,
    FetchRefused,
    Peer,
    PrefillFailed,
    PrefillRequest,
    Progress,
    Quiesced,
)
from engine.chunked import CachedRange, ChunkedPrefill, PrefillStep
from prefill_node.choices import FetchPolicy
from prefill_node.compute import Computed, ComputeThread, StepCompute
from prefill_node.engine import PrefillEngine, PrefillUpdate
from prefill_node.fetch import FetchReport
from prefill_node.fetcher import Fetcher, FetchResources
from prefill_node.job import JobState, TransferJob
from prefill_node.offer import Destinations, Offer
from prefill_node.outgoing import Chunk, SendReport
from prefill_node.prefix_fetches import PrefixFetches
from prefill_node.progress import ForwardProgress
from prefill_node.sender import ChunkSender, Sender, SendResources

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of.

    wake: called, on any thread, when something has happened that `poll` tells. transfer_timeout: seconds that a job's
    transfer may go on after its computation. fetching, fetch_policy: for prefixes that decode nodes have.
    """

    prefill: ChunkedPrefill[TransferJob]
    device: torch.device
    resources: SendResources
    fetching: FetchResources
    offer: Offer
    metrics: Metrics
    wake: Callable[[], None]
    transfer_timeout: float
    fetch_policy: FetchPolicy = "auto"


class ModelEngine(PrefillEngine):
    """Owns the jobs, their pages, the compute thread and the sender.

    The calling loop neither computes nor sends. Threads do, and report through a queue that `poll` empties.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._prefill = parts.prefill
        self._device = parts.device
        self._offer = parts.offer
        self._transfer_timeout = parts.transfer_timeout
        self._metrics = parts.metrics
        self._wake = parts.wake
        self._reports: queue.SimpleQueue[Computed | SendReport | FetchReport] = queue.SimpleQueue()
        self._compute: StepCompute = ComputeThread(parts.prefill, parts.device, self._report)
        self._sender: ChunkSender = Sender(parts.resources, self._report)
        self._fetches = PrefixFetches(
            parts.fetch_policy,
            parts.prefill,
            Fetcher(parts.fetching, self._report),
            parts.offer.transports,
            parts.metrics,
            lambda said: self._updates.append(said),
            self._submit,
            parts.wake,
        )
        self._destinations = Destinations()
        self._jobs: dict[AttemptId, TransferJob] = {}
        self._updates: list[PrefillUpdate] = []
        self._computing = False
        self._step_started_at = 0.0
        self._step_may_wait = False
        """Whether it waits for fetched layers: then it does not tell what computing takes."""
        self._passes = 0
        """Forward passes that were started."""
        self.device_failed = False
        """Whether the device does not work any more."""

    # --- PrefillEngine ---

    @property
    def queued_tokens(self) -> int:
        """Tokens of held attempts that are not computed yet."""
        return self._prefill.queued_tokens

    @property
    def attempts(self) -> list[AttemptId]:
        """Held attempts."""
        return list(self._jobs)

    def refusal(self, decode: Peer, request: PrefillRequest) -> str | None:
        refusal = self._offer.refusal(request) or self._destinations.contradiction(decode, request.destination)
        if refusal is None and not self._sender.open(decode):
            return "this node sends to as many decode nodes as it can"
        return refusal

    def start(self, decode: Peer, request: PrefillRequest) -> None:
        job = self._jobs[request.attempt] = TransferJob.of(request, decode)
        self._prefill.add(job)

    def has_begun(self, attempt: AttemptId) -> bool:
        job = self._jobs[attempt]
        return job.computed > 0 or job.in_flight > 0 or job.state is not JobState.COMPUTING

    def stop(self, attempt: AttemptId, reason: str | None = None) -> bool:
        job = self._jobs.get(attempt)
        if job is None:
            return False
        if job.state is JobState.STOPPING:
            job.failure = job.failure if reason is not None else None
            return False
        job.move(JobState.STOPPING)
        job.failure = reason
        self._prefill.forget(job)
        self._fetches.stopped(job)
        if reason is not None and job.in_flight:
            # So the decode node can ask another prefill node at once.
            self._updates.append(_failed(job, reason, in_flight=True))
        self._advance(job)
        return True

    def release(self, attempt: AttemptId) -> bool:
        job = self._jobs.get(attempt)
        if job is None or job.state is not JobState.SENT:
            return False
        self._end(job)
        return True

    def fetch_answered(self, answer: FetchGrant | FetchRefused) -> None:
        if isinstance(answer, FetchGrant):
            self._fetches.granted(answer)
        else:
            self._fetches.refused(answer)

    def poll(self) -> list[PrefillUpdate]:
        while not self._reports.empty():
            match self._reports.get():
                case Computed() as computed:
                    self._on_computed(computed)
                case SendReport() as report:
                    self._on_sent(report)
                case FetchReport() as report:
                    self._on_fetched(report)
        now = time.monotonic()
        self._stop_late_transfers(now)
        self._fetches.give_up_late(now)
        self._start_step()
        updates, self._updates = self._updates, []
        return updates

    def progress(self, attempts: tuple[AttemptId, ...]) -> Progress:
        computed = tuple((attempt, self._jobs[attempt].computed) for attempt in attempts if attempt in self._jobs)
        return Progress(computed=computed, current_pass=self._passes if self._computing else None)

    def keep_connected(self, decode_nodes: set[Peer]) -> None:
        boot_ids = {decode.boot_id for decode in decode_nodes}
        self._sender.keep_only(boot_ids)
        self._fetches.keep_only(boot_ids)

    def close(self, timeout: float) -> None:
        """Wait so many seconds for writes, and for a forward pass, to end. What is under way then ends with the
        process."""
        deadline = time.monotonic() + timeout
        self._fetches.close()
        if not self._sender.stop(timeout):
            log.warning("writes are still in flight; the engine's end stops them")
        if not self._compute.stop(max(0.0, deadline - time.monotonic())):
            log.warning("a forward pass is still under way; the engine's end stops it")

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date for a scrape. Any thread may call it."""
        pool, free, cached = self._prefill.pool, self._prefill.pool.free_pages, self._prefill.pages.cached_pages
        self._metrics.prefill_pages.labels("free").set(free)
        self._metrics.prefill_pages.labels("cached").set(cached)
        self._metrics.prefill_pages.labels("used").set(max(0, pool.num_pages - free - cached))
        self._metrics.prompt_tokens_waiting.set(self.queued_tokens)
        states = [job.state for job in list(self._jobs.values())]
        for state in JobState:
            self._metrics.requests.labels(state.value).set(states.count(state))

    # --- work ---

    def _report(self, event: Computed | SendReport | FetchReport) -> None:
        self._reports.put(event)
        self._wake()

    def _start_step(self) -> None:
        """Start the next forward pass, and the sending of what it computes, layer by layer, and of what is cached."""
        if self.device_failed:
            return
        self._prefill.start_waiting()
        for job in self._prefill.take_started():
            self._fetches.consider(job)
        step = None if self._computing else self._next_step()
        for found in self._prefill.take_found():
            self._send_cached(found)
        if step is None:
            return
        self._computing = True
        self._passes += 1
        self._step_started_at = time.monotonic()
        self._step_may_wait = any(job.arriving is not None for job, _ in step.chunks)
        progress = self._compute.start(step)
        for job, chunk in step.chunks:
            job.in_flight += 1  # being computed
            self._send(job, chunk.start, chunk.stop, progress)

    def _next_step(self) -> PrefillStep[TransferJob] | None:
        self._fetches.join()
        return self._prefill.plan()

    def _send_cached(self, found: CachedRange[TransferJob]) -> None:
        """In pieces of the size of chunks, so that the decode node verifies one while the next is sent."""
        job = found.job
        over = ForwardProgress.over(self._device, self._prefill.pool.layout.num_layers)
        for start in range(max(found.start, job.start), found.stop, self._prefill.chunk_size):
            self._send(job, start, min(start + self._prefill.chunk_size, found.stop), over)
        if found.stop == job.num_tokens:
            self._all_computed(job)

    def _send(self, job: TransferJob, start: int, stop: int, progress: ForwardProgress) -> None:
        """Send positions [start, stop) as the forward pass computes them, but for those that the decode node has."""
        chunk = job.chunk(start, stop, progress)
        if chunk is None:
            return
        if job.arriving is not None:
            job.arriving.chunks.append(chunk)
        else:
            self._submit(job, chunk)

    def _submit(self, job: TransferJob, chunk: Chunk) -> None:
        job.in_flight += 1
        self._sender.submit(chunk)

    def _on_computed(self, computed: Computed) -> None:
        """Raises DeviceFailed."""
        self._computing = False
        if computed.error is None:
            self._prefill.complete(computed.step, without=computed.void)
            ranges = [(chunk.start, chunk.stop) for _, chunk in computed.step.chunks]
            if not self._step_may_wait:
                self._fetches.compute_cost.observe(ranges, time.monotonic() - self._step_started_at)
        for job, chunk in computed.step.chunks:
            job.in_flight -= 1
            if computed.error is not None:
                if not self.stop(job.attempt, computed.error):
                    self._advance(job)  # It was stopped before.
                continue
            if job in computed.void:
                log.info("pass is void: the prefix did not come in time", **job.attempt.log_fields)
                self._fetches.on_void(job)
                self._advance(job)
                continue
            self._metrics.prompt_tokens.inc(chunk.stop - chunk.start)
            if (found := computed.prompt_logprobs.get(job)) is not None:
                job.unsent_logprobs.append(found)
            if job.state is JobState.COMPUTING and not job.remaining:
                self._all_computed(job)
            self._advance(job)
        if computed.device_failed is not None:
            self.device_failed = True
            raise computed.device_failed

    def _all_computed(self, job: TransferJob) -> None:
        job.computed_at = time.monotonic()
        job.move(JobState.SENDING)
        self._metrics.prefix_cache_queries.labels("prefill").inc(job.num_tokens)
        self._metrics.prefix_cache_hits.labels("prefill").inc(job.cached)

    def _on_fetched(self, report: FetchReport) -> None:
        job = self._jobs[report.fetch.attempt]
        if report.in_flight:
            log.error(
                "nobody knows whether a read has ended: its pages, and its slots at the decode node, are free when "
                "this process ends; restart it",
                decode=job.decode.address,
                **job.attempt.log_fields,
            )
            self.stop(job.attempt, f"fetch failed: {report.error}")
        else:
            job.in_flight -= 1
        self._fetches.on_report(report)
        self._advance(job)

    def _on_sent(self, report: SendReport) -> None:
        job = self._jobs[report.chunk.attempt]
        job.lingering |= report.lingering
        if report.in_flight:
            log.error(
                "nobody knows whether a write has ended: its pages, and its slots at the decode node, are free when "
                "this process ends; restart it",
                decode=job.decode.address,
                **job.attempt.log_fields,
            )
        else:
            job.in_flight -= 1
        if report.error is None:
            self._metrics.transfer_bytes.inc(report.num_bytes)
            self._metrics.transfer_descriptors.inc(report.num_descriptors)
            self._metrics.transfer_seconds.observe(report.seconds())
            if chunk_done := job.landed(report):
                # The decode node can verify these checksums while later chunks compute.
                self._updates.append(chunk_done)
        elif job.state is not JobState.STOPPING:
            self._metrics.transfer_failures.labels("write").inc()
            self.stop(job.attempt, f"transfer failed: {report.error}")
            return
        self._advance(job)

    def _advance(self, job: TransferJob) -> None:
        """Once nothing of a job is in flight, end it if it was stopped, or announce that all was sent."""
        if job.in_flight:
            return
        if job.state is JobState.STOPPING:
            self._end(job)
            if job.failure is None:
                self._updates.append(Quiesced(attempt=job.attempt, lingering=job.lingering))
            else:
                self._updates.append(_failed(job, job.failure, in_flight=False))
        elif job.state is JobState.SENDING:
            assert job.computed_at is not None
            job.move(JobState.SENT)
            self._updates.append(job.done())
            log.info(
                "sent",
                cached=job.cached,
                fetched=job.fetched,
                bytes=job.num_bytes,
                descriptors=job.num_descriptors,
                seconds=round(job.seconds, 4),
                after_compute=round(time.monotonic() - job.computed_at, 4),
                lingering=job.lingering,
                **job.attempt.log_fields,
            )

    def _end(self, job: TransferJob) -> None:
        """The one place where a job's pages are released. Raises SlotAccountingError if any has leaked."""
        self._prefill.release(job)
        del self._jobs[job.attempt]
        if not self._jobs:
            self._prefill.pages.check_idle()

    def _stop_late_transfers(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if job.state is JobState.SENDING and now - (job.computed_at or now) > self._transfer_timeout:
                self._metrics.transfer_failures.labels("timeout").inc()
                self.stop(job.attempt, f"transfer took longer than {self._transfer_timeout:g} s")


def _failed(job: TransferJob, reason: str, in_flight: bool) -> PrefillFailed:
    return PrefillFailed(attempt=job.attempt, reason=reason, in_flight=in_flight, lingering=job.lingering)
