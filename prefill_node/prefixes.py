"""Decides which prefixes are fetched back from decode nodes instead of being computed, and follows them.

docs/design.md ("Fetches") has the rules. What was read counts as computed once every digest matches, and every rank has
all of it. Whatever else happens, the attempt computes from where it was. A wrong estimate costs at most the time of
computing again.
"""

import time
from collections.abc import Callable, Mapping

import structlog
import torch

from base.metrics import FetchFailure, Metrics
from control.messages import AttemptId, FetchDone, FetchGrant, FetchRefused, FetchRequest
from engine.chunked import ChunkedPrefill
from prefill_node.arrival import arrives_in_time, pass_patience
from prefill_node.attempt import HeldAttempt, HeldState, PrefixFetch
from prefill_node.config import FetchPolicy
from prefill_node.costs import ComputeCost, FetchCosts
from prefill_node.orders import DividedPrefix, TransferReport
from transfer.choices import Transport

log = structlog.get_logger(__name__)

LEAST_TOKENS = 64
"""Fewer are not worth the messages."""
_PATIENCE_S = 30.0
"""How long a fetch may take whatever computing would."""
_LEAST_PATIENCE_S = 0.25
_PAUSE_S = 5.0
"""How long nothing is fetched from a decode node after a fetch from it has failed."""

FetchMessage = FetchRequest | FetchDone
_BRINGS_NOTHING = (HeldState.WAITING, HeldState.DROPPED)
_WANTED = (HeldState.READING, HeldState.JOINED, HeldState.LATE)


class PrefixFetches:
    """The fetches of held attempts, at most one for an attempt. The planner's loop calls it.

    Without a prefix cache nothing is fetched. policy: `always` and `never` whatever the estimates. transports: those
    of this node, the best first. say: takes what is to be told the decode node.
    """

    def __init__(
        self,
        policy: FetchPolicy,
        prefill: ChunkedPrefill[HeldAttempt],
        held: Mapping[AttemptId, HeldAttempt],
        world_size: int,
        transports: tuple[Transport, ...],
        metrics: Metrics,
        say: Callable[[FetchMessage], None],
    ) -> None:
        self.policy = policy
        self.compute_cost = ComputeCost(prefill.chunk_size)
        self.fetch_costs = FetchCosts()
        self._prefill = prefill
        self._held = held
        self._world_size = world_size
        self._transports = transports
        self._metrics = metrics
        self._say = say
        self._paused_until: dict[str, float] = {}

    def consider(self, attempt: HeldAttempt) -> None:
        """Ask for the prefix of an attempt that was just started, if that is better than to compute it."""
        start, stop = attempt.computed, attempt.start
        if self.policy == "never" or self._prefill.pages.prefixes is None or not attempt.reuse or attempt.in_flight:
            return
        if attempt.state is not HeldState.COMPUTING or stop - start < LEAST_TOKENS:
            return
        now = time.monotonic()
        patience = self._patience(attempt, start, stop, now)
        if patience is None:
            return
        if (by := self._fetch_of_same(attempt, start)) is not None:
            attempt.move(HeldState.WAITING)
        else:
            attempt.move(HeldState.ASKING)
            self._say(FetchRequest(attempt=attempt.id, start=start, stop=stop))
        attempt.fetch = PrefixFetch(by or attempt, start, stop, now, now + patience)

    def answered(self, answer: FetchGrant | FetchRefused) -> PrefixFetch | None:
        """Return the fetch to read now; None if the decode node does not lend the prefix, which is computed then."""
        attempt = self._held.get(answer.attempt)
        if attempt is None or attempt.state is not HeldState.ASKING:
            return None
        fetch = _fetch_of(attempt)
        refusal = answer.reason if isinstance(answer, FetchRefused) else _grant_error(fetch, answer)
        if refusal is not None:
            self._end(attempt, refusal, "refused")
            return None
        attempt.move(HeldState.READING)
        return fetch

    def join(self) -> None:
        """Let attempts into the next step whose prefix comes faster than a step computes. No step is under way."""
        now = time.monotonic()
        for attempt in self._held.values():
            fetch = attempt.fetch
            if attempt.state is not HeldState.READING or fetch is None or fetch.layers is None:
                continue
            until = min(attempt.num_tokens, fetch.stop + self._prefill.chunk_size)
            seconds = self.compute_cost.of_pass(fetch.stop, until)
            if until == fetch.stop or seconds is None:
                continue
            if arrives_in_time(fetch.layers, self._prefill.pool.layout.num_layers, seconds, now):
                attempt.move(HeldState.JOINED)
                attempt.computed = fetch.stop
                fetch.patience = pass_patience(seconds)

    def on_void(self, attempt: HeldAttempt) -> None:
        """A step has ended that the attempt's prefix did not reach in time."""
        if attempt.state is HeldState.JOINED:
            attempt.leave_step()
            attempt.move(HeldState.LATE)

    def on_read(self, attempt: HeldAttempt, report: TransferReport) -> list[tuple[int, int, int]]:
        """All ranks have ended their reads. Returns what may be sent now, as `PrefixFetch.withheld`."""
        fetch = _fetch_of(attempt)
        if report.error is None and self._world_size > 1 and attempt.state.is_fetching:
            attempt.move(HeldState.READ)
            fetch.report, fetch.read_at = report, time.monotonic()
            return []
        return self._finish(attempt, report)

    def take_read(self) -> list[HeldAttempt]:
        """Attempts whose prefix is to be exchanged by the ranks now."""
        found = [attempt for attempt in self._held.values() if attempt.state is HeldState.READ]
        for attempt in found:
            attempt.move(HeldState.GATHERING)
            fetch = _fetch_of(attempt)
            fetch.waited = time.monotonic() - fetch.read_at
        return found

    def divided(self, attempt: HeldAttempt) -> DividedPrefix:
        assert attempt.pages is not None
        return DividedPrefix(attempt.pages, _fetch_of(attempt).bounds)

    def on_gathered(self, attempt: HeldAttempt) -> None:
        """Every rank has all of the prefix."""
        report = _fetch_of(attempt).report
        assert report is not None
        self._finish(attempt, report)

    def stopped(self, attempt: HeldAttempt, was: HeldState) -> None:
        """The attempt was given up. A fetch of which nothing is being read or exchanged ends."""
        fetch = attempt.fetch
        if fetch is not None and was in (HeldState.WAITING, HeldState.ASKING, HeldState.READ):
            attempt.in_flight.discard(fetch.work or 0)
            self._forget(attempt)

    def give_up_late(self, now: float) -> list[int]:
        """Compute what was not read in time, once nothing is read any more. Returns the numbers to be cancelled."""
        late = []
        for attempt in list(self._held.values()):
            fetch = attempt.fetch
            if fetch is None or now < fetch.until:
                continue
            if attempt.state in _WANTED and fetch.work is not None:
                attempt.leave_step()
                attempt.move(HeldState.DROPPED)
                late.append(fetch.work)
            elif attempt.state is HeldState.ASKING:
                self._learn(attempt, now - fetch.asked_at, num_bytes=0)
                self._end(attempt, "not granted in time", "timeout")
        return late

    def _patience(self, attempt: HeldAttempt, start: int, stop: int, now: float) -> float | None:
        """How long a fetch may take; None if it is not worth trying."""
        if self.policy == "always":
            return _PATIENCE_S
        if now < self._paused_until.get(attempt.decode.boot_id, now):
            return None
        computing = self.compute_cost.saved(start, stop, attempt.num_tokens)
        num_bytes = (stop - start) * self._prefill.pool.layout.token_bytes
        fetching = self.fetch_costs.estimate(attempt.decode.boot_id, self._transport_to(attempt), num_bytes)
        if computing is None:
            # Nothing was computed yet: decode nodes are seldom slower.
            return _PATIENCE_S
        if fetching >= computing:
            return None
        return min(_PATIENCE_S, max(_LEAST_PATIENCE_S, computing))

    def _transport_to(self, attempt: HeldAttempt) -> Transport:
        """The one that will be used, unless shared memory cannot be mapped."""
        return next(transport for transport in self._transports if transport in attempt.destination.transports)

    def _learn(self, attempt: HeldAttempt, seconds: float, num_bytes: int | None = None) -> None:
        """Learn what a fetch has taken. num_bytes: read when it was given up; if 0, all of it would have taken
        longer."""
        fetch = _fetch_of(attempt)
        if not num_bytes:
            seconds *= 1 if num_bytes is None else 2
            num_bytes = (fetch.stop - fetch.start) * self._prefill.pool.layout.token_bytes
        self.fetch_costs.observe(attempt.decode.boot_id, self._transport_to(attempt), num_bytes, seconds)

    def _finish(self, attempt: HeldAttempt, report: TransferReport) -> list[tuple[int, int, int]]:
        """A fetch has ended, or nobody will ever know whether it has. Returns as `on_read`."""
        fetch = _fetch_of(attempt)
        assert fetch.work is not None
        if not report.in_flight:
            attempt.in_flight.discard(fetch.work)
        seconds = time.monotonic() - fetch.asked_at
        self._metrics.prefix_fetched_bytes.inc(report.num_bytes)
        self._metrics.prefix_fetch_seconds.observe(seconds)
        if report.error is not None or not report.in_time:
            attempt.leave_step()
        if report.error is not None:
            is_late = attempt.state is HeldState.DROPPED
            if is_late:
                self._learn(attempt, seconds, report.num_bytes)
            self._end(attempt, report.error, "timeout" if is_late else report.failure or "read")
            return []
        # Computing would have waited, too, for the step that was under way.
        self._learn(attempt, seconds - fetch.waited)
        if attempt.state.is_fetching:
            self._prefill.mark_cached(attempt, fetch.stop)
            attempt.fetched = fetch.stop - fetch.start
            self._metrics.prefix_fetched_tokens.inc(attempt.fetched)
            log.debug(
                "fetched",
                tokens=attempt.fetched,
                bytes=report.num_bytes,
                seconds=round(seconds, 4),
                reading=round(report.seconds(), 4),
                meanwhile=sum(stop - start for start, stop, _ in fetch.withheld),
                **attempt.id.log_fields,
            )
        self._end(attempt)
        return fetch.withheld

    def _end(self, attempt: HeldAttempt, error: str | None = None, failure: FetchFailure | None = None) -> None:
        """The attempt goes on, unless it was stopped: then the end of its reads is told with the end of the attempt."""
        fetch = _fetch_of(attempt)
        tokens = fetch.stop - fetch.start
        attempt.span.record("fetch", fetch.asked_at, attributes=lambda: {"tokens": tokens}, error=error)
        if attempt.state.is_fetching:
            if failure is not None:
                self._note_failure(attempt, error, failure)
            attempt.move(HeldState.COMPUTING)
            self._say(FetchDone(attempt=attempt.id))
        self._forget(attempt)

    def _note_failure(self, attempt: HeldAttempt, error: str | None, failure: FetchFailure) -> None:
        self._metrics.prefix_fetch_failures.labels(failure).inc()
        decode = attempt.decode
        log.warning("fetch failed", reason=error, kind=failure, decode=decode.address, **attempt.id.log_fields)
        if failure != "timeout":
            now = time.monotonic()
            self._paused_until = {boot: until for boot, until in self._paused_until.items() if until > now}
            self._paused_until[decode.boot_id] = now + _PAUSE_S

    def _forget(self, attempt: HeldAttempt) -> None:
        """A fetch is over. Attempts that have waited for it use what it brought, and may fetch the rest."""
        attempt.fetch = None
        for other in list(self._held.values()):
            if other.state is HeldState.WAITING and other.fetch is not None and other.fetch.by is attempt:
                other.fetch = None
                other.move(HeldState.COMPUTING)
                self._prefill.rematch_prefix(other)
                self.consider(other)

    def _fetch_of_same(self, attempt: HeldAttempt, start: int) -> HeldAttempt | None:
        """An attempt whose fetch brings a prefix of what this one lacks."""
        for other in self._held.values():
            fetch = other.fetch
            if fetch is None or not other.state.is_fetching or other.state in _BRINGS_NOTHING:
                continue
            stop = min(fetch.stop, attempt.start)
            if (
                other.salt == attempt.salt
                and stop - start >= LEAST_TOKENS
                and torch.equal(other.token_ids[:stop], attempt.token_ids[:stop])
            ):
                return other
        return None


def _fetch_of(attempt: HeldAttempt) -> PrefixFetch:
    assert attempt.fetch is not None, f"attempt {attempt.id} fetches nothing"
    return attempt.fetch


def _grant_error(fetch: PrefixFetch, grant: FetchGrant) -> str | None:
    """How a grant differs from what was asked for."""
    if (grant.start, grant.stop) != (fetch.start, fetch.stop):
        return f"granted [{grant.start}, {grant.stop}), asked for [{fetch.start}, {fetch.stop})"
    num_slots = fetch.by.destination.buffers.num_items
    if any(first + length > num_slots for first, length in grant.extents):
        return f"an extent ends past the {num_slots} slots of the decode node"
    if (granted := sum(length for _, length in grant.extents)) != grant.stop - grant.start:
        return f"{granted} slots for {grant.stop - grant.start} positions"
    return None
