"""Decides which prefixes are fetched back from decode nodes instead of being computed, and follows them.

A job that has its pages, and lacks KV that its decode node has (the positions before `PrefillRequest.start`), asks for
it if fetching is estimated to take less time than computing. What was read counts as computed once every digest
matches. Whatever else happens, the job computes from where it was. A fetch that takes as long as computing would have
is given up, so a wrong estimate costs at most that time again.

Layers are read in their order, and the job *joins* a forward pass, behind the prefix, as soon as the rest of them is
expected before the pass needs it (`PrefixArrival.keeps_ahead_of`). Until then it is in no pass, so a slow link delays
nobody else. The pass waits for each layer. What it computes of the job is sent and cached only when all of the prefix
is there. If that is not in time the pass is void for this job, which joins no other: it is held until its fetch ends.

Of jobs that lack the same prefix at the same time one fetches it. The others wait for that and look again then.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import torch

from base.metrics import Metrics
from control.messages import AttemptId, FetchDone, FetchGrant, FetchRefused, FetchRequest
from engine.chunked import ChunkedPrefill
from prefill_node.arrival import PrefixArrival, pass_patience
from prefill_node.choices import FetchPolicy
from prefill_node.costs import ComputeCost, FetchCosts
from prefill_node.fetch import Fetch, FetchFailure, FetchReport
from prefill_node.fetcher import PrefixFetcher
from prefill_node.job import ArrivingPrefix, JobState, TransferJob
from prefill_node.outgoing import Chunk
from transfer.choices import Transport
from transfer.planner import expand_extents

log = structlog.get_logger(__name__)

LEAST_TOKENS = 64
"""Fewer are not worth the messages."""
_PATIENCE_S = 30.0
"""How long a fetch may take whatever computing would."""
_LEAST_PATIENCE_S = 0.25
_PAUSE_S = 5.0
"""How long nothing is fetched from a decode node after a fetch from it has failed."""

Said = FetchRequest | FetchDone


@dataclass(eq=False)
class _Running:
    """The fetch of a job. arrival: of what was granted. given_up: it is not wanted any more. waiting: jobs that wait
    for its end."""

    job: TransferJob
    start: int
    stop: int
    asked_at: float
    until: float
    arrival: PrefixArrival
    is_granted: bool = False
    given_up: bool = False
    waiting: list[TransferJob] = field(default_factory=list)


class PrefixFetches:
    """The fetches of a prefill engine, at most one for a job. The engine's loop calls it.

    Without a prefix cache nothing is fetched. policy: `always` and `never` whatever the estimates. transports: those
    of this node, the best first. say: takes what is to be told the decode node. send: takes chunks whose prefix
    has come. wake: called, on any thread, when a layer has come and `join` may do something.
    """

    def __init__(
        self,
        policy: FetchPolicy,
        prefill: ChunkedPrefill[TransferJob],
        fetcher: PrefixFetcher,
        transports: tuple[Transport, ...],
        metrics: Metrics,
        say: Callable[[Said], None],
        send: Callable[[TransferJob, Chunk], None],
        wake: Callable[[], None],
    ) -> None:
        self.policy = policy
        self.compute_cost = ComputeCost(prefill.chunk_size)
        self.fetch_costs = FetchCosts()
        self._prefill = prefill
        self.fetcher = fetcher
        self._transports = transports
        self._metrics = metrics
        self._say = say
        self._send = send
        self._wake = wake
        self._running: dict[AttemptId, _Running] = {}
        self._paused_until: dict[str, float] = {}

    def consider(self, job: TransferJob) -> None:
        """Ask for the prefix of a job that was just started, if that is better than to compute it."""
        start, stop = job.computed, job.start
        if self.policy == "never" or not self._prefill.pages.is_on or not job.reuse or job.in_flight:
            return
        if job.state is not JobState.COMPUTING or stop - start < LEAST_TOKENS:
            return
        now = time.monotonic()
        patience = self._patience(job, start, stop, now)
        if patience is None:
            return
        job.move(JobState.FETCHING)
        job.is_held = True
        if (same := self._fetch_of(job, start)) is not None:
            same.waiting.append(job)
            return
        arrival = PrefixArrival(self._prefill.pool.layout.layer_of_buffer, self._wake)
        self._running[job.attempt] = _Running(job, start, stop, now, now + patience, arrival)
        self._say(FetchRequest(attempt=job.attempt, start=start, stop=stop))

    def granted(self, grant: FetchGrant) -> None:
        """Read what the decode node lends. A grant of what is not wanted any more is ignored."""
        running = self._running.get(grant.attempt)
        if running is None or running.is_granted:
            return
        running.is_granted = True
        job = running.job
        wrong = None
        if (grant.start, grant.stop) != (running.start, running.stop):
            wrong = f"granted [{grant.start}, {grant.stop}), asked for [{running.start}, {running.stop})"
        elif any(first + length > job.destination.buffers.num_items for first, length in grant.extents):
            wrong = f"an extent ends past the {job.destination.buffers.num_items} slots of the decode node"
        elif sum(length for _, length in grant.extents) != grant.stop - grant.start:
            wrong = f"{sum(length for _, length in grant.extents)} slots for {grant.stop - grant.start} positions"
        if wrong is not None:
            self._over(running, wrong, "refused")
            return
        assert job.pages is not None
        job.in_flight += 1
        self.fetcher.submit(
            Fetch(
                attempt=job.attempt,
                decode=job.decode,
                destination=job.destination,
                start=grant.start,
                stop=grant.stop,
                pages=job.pages,
                slots=expand_extents(grant.extents),
                checksums=grant.checksums,
                go_on=lambda: not running.given_up and job.state is JobState.FETCHING,
                arrival=running.arrival,
            )
        )

    def join(self) -> None:
        """Let jobs into the next pass whose prefix comes faster than a pass computes. None is under way."""
        for running in self._running.values():
            job = running.job
            if not running.is_granted or not job.is_held or job.state is not JobState.FETCHING:
                continue
            until = min(job.num_tokens, running.stop + self._prefill.chunk_size)
            seconds = self.compute_cost.of_pass(running.stop, until)
            if until == running.stop or seconds is None or not running.arrival.keeps_ahead_of(seconds):
                continue
            job.arriving = ArrivingPrefix(running.arrival, pass_patience(seconds))
            job.computed = running.stop
            job.is_held = False

    def on_void(self, job: TransferJob) -> None:
        """A pass is over that the job's prefix did not reach in time."""
        running = self._running.get(job.attempt)
        if running is not None and job.state is JobState.FETCHING:
            self._leave(running)

    def refused(self, message: FetchRefused) -> None:
        """The decode node does not lend: compute."""
        running = self._running.get(message.attempt)
        if running is not None and not running.is_granted:
            self._over(running, message.reason, "refused")

    def on_report(self, report: FetchReport) -> None:
        """The reads of a fetch have ended. The caller has counted them as in flight no more, if that is so."""
        running = self._running[report.fetch.attempt]
        job = running.job
        seconds = time.monotonic() - running.asked_at
        self._metrics.prefix_fetched_bytes.inc(report.num_bytes)
        self._metrics.prefix_fetch_seconds.observe(seconds)
        arriving = job.arriving
        in_time = report.error is None and job.state is JobState.FETCHING and running.arrival.end()
        if not in_time:
            self._leave(running)
        if report.error is not None:
            if running.given_up:
                self._learn_of_part(running, report.num_bytes, seconds)
            self._over(running, report.error, "timeout" if running.given_up else report.failure or "read")
            return
        self._learn(running, seconds - report.waited)
        if job.state is JobState.FETCHING:
            self._prefill.brought(job, running.stop)
            job.fetched = running.stop - running.start
            self._metrics.prefix_fetched_tokens.inc(job.fetched)
            log.info(
                "fetched",
                tokens=job.fetched,
                bytes=report.num_bytes,
                seconds=round(seconds, 4),
                reading=round(report.seconds, 4),
                meanwhile=0 if arriving is None else sum(chunk.stop - chunk.start for chunk in arriving.chunks),
                **job.attempt.log_fields,
            )
        self._over(running)
        if in_time and arriving is not None:
            job.arriving = None
            for chunk in arriving.chunks:
                self._send(job, chunk)

    def stopped(self, job: TransferJob) -> None:
        """The job was given up. What is not being read is over."""
        running = self._running.get(job.attempt)
        if running is None:
            return
        running.arrival.give_up()
        if not running.is_granted:
            self._end(running)

    def give_up_late(self, now: float) -> None:
        """Compute what was not brought in time, once nothing is read any more."""
        for running in list(self._running.values()):
            if now < running.until or running.given_up:
                continue
            running.given_up = True
            running.arrival.give_up()
            if not running.is_granted:
                self._learn_of_part(running, 0, now - running.asked_at)
                self._over(running, "not granted in time", "timeout")

    def keep_only(self, boot_ids: set[str]) -> None:
        """Keep connections to these decode nodes only, once nothing is read from others."""
        self.fetcher.keep_only(boot_ids)

    def close(self) -> None:
        """No pass is to wait for a prefix any more."""
        for running in self._running.values():
            running.arrival.give_up()
        self.keep_only(set())

    def _patience(self, job: TransferJob, start: int, stop: int, now: float) -> float | None:
        """How long a fetch may take; None if it is not worth trying."""
        if self.policy == "always":
            return _PATIENCE_S
        if now < self._paused_until.get(job.decode.boot_id, now):
            return None
        computing = self.compute_cost.saved(start, stop, job.num_tokens)
        num_bytes = (stop - start) * self._prefill.pool.layout.token_bytes
        fetching = self.fetch_costs.estimate(job.decode.boot_id, self._transport_to(job), num_bytes)
        if computing is None:
            # Nothing was computed yet: decode nodes are seldom slower.
            return _PATIENCE_S
        if fetching >= computing:
            return None
        return min(_PATIENCE_S, max(_LEAST_PATIENCE_S, computing))

    def _transport_to(self, job: TransferJob) -> Transport:
        """The one that will be used, unless shared memory cannot be mapped."""
        return next(transport for transport in self._transports if transport in job.destination.transports)

    def _learn(self, running: _Running, seconds: float) -> None:
        job = running.job
        num_bytes = (running.stop - running.start) * self._prefill.pool.layout.token_bytes
        self.fetch_costs.observe(job.decode.boot_id, self._transport_to(job), num_bytes, seconds)

    def _learn_of_part(self, running: _Running, num_bytes: int, seconds: float) -> None:
        """Of a fetch that was given up when so many bytes had come. If none had, all would have taken longer."""
        if num_bytes:
            job = running.job
            self.fetch_costs.observe(job.decode.boot_id, self._transport_to(job), num_bytes, seconds)
        else:
            self._learn(running, 2 * seconds)

    def _over(self, running: _Running, error: str | None = None, failure: FetchFailure | None = None) -> None:
        """The job goes on, unless it was stopped: then the end of its last read is told with the end of the job."""
        job = running.job
        if job.state is not JobState.FETCHING:
            self._end(running)
            return
        if failure is not None:
            self._metrics.prefix_fetch_failures.labels(failure).inc()
            log.warning("fetch failed", reason=error, kind=failure, decode=job.decode.address, **job.attempt.log_fields)
            if failure != "timeout":
                now = time.monotonic()
                self._paused_until = {boot: until for boot, until in self._paused_until.items() if until > now}
                self._paused_until[job.decode.boot_id] = now + _PAUSE_S
        self._go_on(job)
        self._say(FetchDone(attempt=job.attempt))
        self._end(running)

    def _end(self, running: _Running) -> None:
        """Forget a fetch. Jobs that have waited for it use what it brought, and may fetch the rest."""
        del self._running[running.job.attempt]
        for job in running.waiting:
            if job.state is JobState.FETCHING:
                self._go_on(job)
                self._prefill.look_again(job)
                self.consider(job)

    def _leave(self, running: _Running) -> None:
        """The job is in no pass before its fetch is over; what one computes of it is void."""
        job = running.job
        if job.arriving is not None:
            job.arriving = None
            job.computed = running.start
            job.is_held = True

    def _go_on(self, job: TransferJob) -> None:
        job.is_held = False
        job.move(JobState.COMPUTING)

    def _fetch_of(self, job: TransferJob, start: int) -> _Running | None:
        """A fetch that brings a prefix of what a job lacks."""
        for running in self._running.values():
            stop = min(running.stop, job.start)
            other = running.job
            if (
                other.salt == job.salt
                and not running.given_up
                and stop - start >= LEAST_TOKENS
                and torch.equal(other.token_ids[:stop], job.token_ids[:stop])
            ):
                return running
        return None
