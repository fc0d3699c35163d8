"""Steps of a prefill node: forward passes, and gathers of prefixes. At most one is under way."""

import time
from dataclasses import dataclass

import structlog

from base.metrics import Metrics
from engine.chunked import ChunkedPrefill, PrefillStep
from prefill_node.attempt import HeldAttempt, HeldState
from prefill_node.dispatch import Dispatch
from prefill_node.orders import StepEnded
from prefill_node.prefixes import PrefixFetches
from prefill_node.telemetry import record_chunk

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Running:
    """The step that is under way. gathered: the attempts whose prefixes it exchanges; then it has no chunks."""

    started_at: float
    step: PrefillStep[HeldAttempt]
    gathered: list[HeldAttempt]
    may_wait: bool
    """Whether it waits for layers that are read: then it does not tell what computing takes."""


class PrefillSteps:
    """Has all ranks carry out one step after the other. The planner's loop calls it.

    started, ended: how many. A failed step has ended, too.
    """

    def __init__(
        self, prefill: ChunkedPrefill[HeldAttempt], dispatch: Dispatch, fetches: PrefixFetches, metrics: Metrics
    ) -> None:
        self.started = 0
        self.ended = 0
        self._prefill = prefill
        self._dispatch = dispatch
        self._fetches = fetches
        self._metrics = metrics
        self._running: _Running | None = None

    @property
    def is_idle(self) -> bool:
        return self._running is None

    def gather(self, attempts: list[HeldAttempt]) -> None:
        """Have the ranks exchange the prefixes that each has read a block of."""
        self._dispatch.start_gather(list(map(self._fetches.divided, attempts)))
        self._run(PrefillStep([]), attempts)

    def compute(self, step: PrefillStep[HeldAttempt]) -> None:
        """Have the ranks compute a forward pass."""
        self._dispatch.start_step(step)
        for attempt, _ in step.chunks:
            attempt.begin()
        self._run(step, [])

    def end(self, ended: StepEnded) -> list[HeldAttempt]:
        """Count what the step that has ended did. Returns the attempts that were part of it."""
        running, self._running = self._running, None
        assert running is not None
        self.ended += 1
        for attempt in running.gathered:
            self._fetches.on_gathered(attempt)
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
            if ended.error is None and attempt in void:
                log.info("step is void: the prefix did not come in time", **attempt.id.log_fields)
                self._fetches.on_void(attempt)
            elif ended.error is None:
                self._metrics.prompt_tokens.inc(chunk.stop - chunk.start)
                if (found := ended.prompt_logprobs.get(at)) is not None:
                    attempt.unsent_logprobs.append(found)
        return [*running.gathered, *(attempt for attempt, _ in chunks)]

    def _run(self, step: PrefillStep[HeldAttempt], gathered: list[HeldAttempt]) -> None:
        may_wait = any(attempt.state is HeldState.JOINED for attempt, _ in step.chunks)
        self._running = _Running(time.monotonic(), step, gathered, may_wait)
        self.started += 1
