"""Runs decode steps: one is in flight while the next is prepared."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import structlog

from base.metrics import Metrics
from decode_node.grammars import Grammars
from decode_node.request import Request, RequestState
from engine.adjustments import Ban
from engine.draft_policy import StepSize
from engine.grammar import GrammarViolation
from engine.runner import Batch, Computed, LaunchedStep, ModelRunner
from hisparse.coordinator import HiSparseCoordinator
from ranks.barrier import GroupFailed
from ranks.group import Ranks

log = structlog.get_logger(__name__)


class _Step(NamedTuple):
    """A step with the requests of its entries."""

    launched: LaunchedStep
    requests: tuple[Request, ...]


class Stepper:
    """Launches a step before it takes the tokens of the one before, so that the device need not wait for the host.

    Each turn of the loop calls `launch`, `take` and `sample`. A failed step is not repeated: `on_failure` gets the ids
    of its requests and the error. Every method raises DeviceFailed if the device does not work any more.
    """

    def __init__(
        self,
        runner: ModelRunner,
        coordinator: HiSparseCoordinator,
        metrics: Metrics,
        grammars: Grammars,
        on_failure: Callable[[Sequence[str], Exception], None],
        ranks: Ranks,
    ) -> None:
        self._runner = runner
        self._grammars = grammars
        self._coordinator = coordinator
        self._metrics = metrics
        self._on_failure = on_failure
        self._ranks = ranks
        self._launched: _Step | None = None
        """The step whose tokens are not sampled yet."""
        self._in_flight: _Step | None = None
        """The step whose tokens are being sampled and were not taken yet."""
        self._taken_at: float | None = None
        """When the tokens of the last step came (time.perf_counter), if another one was in flight by then."""
        self._stepped: set[str] = set()
        """Ids of requests that were in a step since `take_stepped`."""

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None and self._launched is None

    def launch(self, requests: Sequence[Request]) -> None:
        """Queue a step that computes one token of each request. All must have room for it.

        All ranks of the node launch one, if any has requests. Raises GroupFailed where that is not possible.
        """
        wanted = StepSize(len(requests), self._runner.policy.choose(len(requests)) if requests else 1)
        size = StepSize.unpack(self._ranks.barrier.wait(wanted.packed))
        if not requests:
            if size.batch:
                # Take part in a step of the other ranks.
                with self._in_group():
                    self._runner.pad(size)
            return
        ids = tuple(request.request_id for request in requests)
        batch = Batch(
            request_ids=ids,
            places=self._coordinator.begin_step(ids, size.width),
            sampling=tuple(request.generate.sampling for request in requests),
        )
        for request in requests:
            request.launched += 1
        self._metrics.decode_batch_size.observe(len(requests))
        self._stepped.update(ids)
        with self._guarded(batch), self._in_group():
            self._launched = _Step(self._runner.launch(batch, size.batch), tuple(requests))

    def take(self) -> list[tuple[Request, Computed]]:
        """Wait for what the step in flight has computed for each of its requests, of which some may have ended."""
        step, self._in_flight = self._in_flight, None
        before, self._taken_at = self._taken_at, None
        if step is not None:
            with self._guarded(step.launched.batch):
                computed = self._runner.collect(step.launched)
                self._taken_at = time.perf_counter()
                if before is not None:
                    # The device computed it meanwhile, and nothing else.
                    self._runner.policy.note_time(step.launched.size, self._taken_at - before)
                self._note_drafts(step.requests, computed)
                return list(zip(step.requests, computed, strict=True))
        return []

    def _note_drafts(self, requests: Sequence[Request], found: Sequence[Computed]) -> None:
        """Keep the drafts that a step made, and count those that it verified."""
        all_drafted = all_accepted = 0
        for request, computed in zip(requests, found, strict=True):
            drawn = len(computed.token_ids) + (computed.failure is not None)
            if drafted := min(len(request.drafts), computed.width - 1) if drawn else 0:
                self._runner.policy.note_drafts(drafted, drawn - 1)
                request.drafted += drafted
                request.accepted += drawn - 1
                all_drafted += drafted
                all_accepted += drawn - 1
            request.launched += drawn - 1
            request.drafts = computed.drafts
        self._metrics.draft_tokens.inc(all_drafted)
        self._metrics.accepted_draft_tokens.inc(all_accepted)

    def sample(self) -> None:
        """Queue the sampling of the step that was launched, which is in flight from now on.

        By now all tokens before it were taken, on which depends what its requests may get. The masks of grammars are
        written here, while the device computes the forward pass.
        """
        step, self._launched = self._launched, None
        if step is None:
            return
        with self._guarded(step.launched.batch):
            width = step.launched.batch.places.width
            alive = [request if request.state is not RequestState.FINISHED else None for request in step.requests]
            masks = self._grammars.masks(alive, width)
            for entry, reason in masks.failed.items():
                self._on_failure([step.launched.batch.request_ids[entry]], GrammarViolation(reason))
            bans = [
                Ban(entry * width + place, token_ids)
                for entry, request in enumerate(step.requests)
                if request.adjusts
                for place in range(min(width, 1 + len(request.drafts)))
                if len(token_ids := request.banned_tokens.after(request.generated, request.drafts[:place]))
            ]
            keys = [request.random.keys(len(request.generated), 2 * width - 1) for request in step.requests]
            # Their rows and slots may have other owners from the next turn on.
            ended = [i for i, request in enumerate(step.requests) if request.state is RequestState.FINISHED]
            self._runner.sample(step.launched, np.array(keys), bans, masks.words, ended)
        # After a failure, too: the other ranks of a group compute it.
        with self._guarded(step.launched.batch), self._in_group():
            self._in_flight = step if self._runner.draft(step.launched) else None

    def take_stepped(self) -> set[str]:
        """Ids of requests that were in a step since the last call. Those in flight are also in the next call's result:
        the device may not have computed them yet."""
        stepped = self._stepped
        self._stepped = set() if self._in_flight is None else set(self._in_flight.launched.batch.request_ids)
        return stepped

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        """An error in a forward pass costs the whole group: the other ranks wait for this one in a collective."""
        try:
            yield
        except Exception as error:
            failure = self._ranks.failure(error)
            if failure is error:
                raise
            log.exception("the step of the group failed")
            raise failure from error

    @contextmanager
    def _guarded(self, batch: Batch) -> Iterator[None]:
        """An error costs the requests of the batch, and is not raised, unless it is the group's."""
        try:
            yield
        except GroupFailed:
            raise
        except Exception as error:
            log.exception("decode step failed", batch=len(batch))
            self._runner.give_up(batch)
            self._on_failure(batch.request_ids, error)
