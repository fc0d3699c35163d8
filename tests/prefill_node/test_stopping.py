"""A decode node may stop an attempt at any moment, and that costs no other attempt and no page."""

import random
import time
from collections.abc import Callable, Iterator

import pytest

from control.messages import AttemptId, PrefillDone, PrefillFailed, Quiesced
from prefill_node.job import JobState
from tests.prefill_node.held_engine import HeldEngine

TOKENS = [(7 * i + i // 10) % 100 for i in range(200)]


@pytest.fixture
def node() -> Iterator[HeldEngine]:
    node = HeldEngine()
    yield node
    node.close()


def ends(node: HeldEngine, attempt: AttemptId) -> list[type]:
    """How an attempt ended, as the decode node was told."""
    return [
        type(update)
        for update in node.updates
        if update.attempt == attempt
        and (
            isinstance(update, (PrefillDone, Quiesced)) or (isinstance(update, PrefillFailed) and not update.in_flight)
        )
    ]


@pytest.mark.parametrize("length", [128, 150])
def test_a_job_is_stopped_between_finding_a_cached_prefix_and_sending_it(node: HeldEngine, length: int) -> None:
    fetching, waiting = node.ask(TOKENS[:length], 127), node.ask(TOKENS[:length], 127)
    node.poll()
    caching = node.ask(TOKENS[:128])
    for _ in range(2):
        node.poll()
        node.end_pass()
    node.poll()
    node.engine.stop(fetching)
    assert node.engine.progress((waiting,)).computed == ((waiting, 128),), "it has found the prefix"
    node.engine.stop(waiting)
    node.poll()
    node.run_out()
    assert ends(node, fetching) == ends(node, waiting) == [Quiesced]
    assert ends(node, caching) == [PrefillDone]


def test_a_prompt_that_finds_all_of_itself_in_two_parts_is_sent_once(node: HeldEngine) -> None:
    """The second part is cached after the first was found, and before anything was sent."""
    fetching, waiting = node.ask(TOKENS[:128], 100), node.ask(TOKENS[:128], 100)
    node.poll()
    node.ask(TOKENS[:128])
    node.poll()
    node.end_pass()
    node.poll()
    node.engine.stop(fetching)
    assert node.engine.progress((waiting,)).computed == ((waiting, 64),)
    node.end_pass()
    node.poll()
    node.run_out()
    assert ends(node, waiting) == [PrefillDone]


@pytest.mark.parametrize("reason", [None, "the decode node is gone"])
def test_a_job_that_was_stopped_ends_with_a_pass_that_fails(node: HeldEngine, reason: str | None) -> None:
    attempt = node.ask(TOKENS[:100], start=63)
    node.prefill.chunk_size = 60  # of which nothing is sent
    node.poll()
    node.engine.stop(attempt, reason)
    node.end_pass("out of memory")
    node.poll()
    assert ends(node, attempt) == [Quiesced if reason is None else PrefillFailed]
    node.run_out()


class Walk:
    """Attempts that share prefixes wait, fetch, join passes and send, in a random order of events."""

    def __init__(self, seed: int) -> None:
        self.node = HeldEngine(num_pages=40)
        self.asked: list[AttemptId] = []
        self._rng = random.Random(seed)

    def step(self) -> None:
        """One thing happens of those that may, and usually the engine's loop turns."""
        node = self.node
        may: list[tuple[Callable[[], object], int]] = [(self._ask, 3), (self._time_passes, 1 if node.asked else 0)]
        if node.engine.attempts:
            may += [(self._stop, 2), (lambda: node.engine.release(self._rng.choice(node.engine.attempts)), 1)]
        if node.asked:
            may.append((self._answer, 4))
        if node.fetching.fetches:
            may.append((self._fetch, 4))
        if node.computing.step is not None:
            may.append((lambda: node.end_pass(self._error()), 3))
        if node.sending.chunks:
            may.append((lambda: node.end_chunk(self._rng.randrange(len(node.sending.chunks)), self._error()), 3))
        [act] = self._rng.choices([act for act, _ in may], [weight for _, weight in may])
        act()
        if self._rng.random() < 0.7:
            node.poll()
            jobs = node.engine._jobs.values()
            assert all(job.in_flight or job.state is not JobState.STOPPING for job in jobs)
        node.cache.check_integrity()

    def _error(self) -> str | None:
        return "it failed" if self._rng.random() < 0.15 else None

    def _ask(self) -> None:
        tokens = TOKENS[: self._rng.choice([64, 128, 200])] + [len(self.asked) % 100] * 200
        length, start = self._rng.choice([100, 128, 200]), self._rng.choice([0, 70, 99, 99])
        self.asked.append(self.node.ask(tokens[:length], start))

    def _stop(self) -> None:
        reason = self._rng.choice([None, "the decode node is gone"])
        self.node.engine.stop(self._rng.choice(self.node.engine.attempts), reason)

    def _time_passes(self) -> None:
        self.node.engine._fetches.give_up_late(time.monotonic() + 31)

    def _answer(self) -> None:
        self.node.answer(self._rng.choice(list(self.node.asked)), is_granted=self._rng.random() < 0.8)

    def _fetch(self) -> None:
        number = self._rng.randrange(len(self.node.fetching.fetches))
        if self._rng.random() < 0.6:
            self.node.fetching.fetches[number].arrival.layers_came(1)
        else:
            self.node.end_fetch(number, self._error())


def test_all_pages_come_back_whenever_attempts_are_stopped() -> None:
    for seed in range(150):
        walk = Walk(seed)
        try:
            for _ in range(60):
                walk.step()
            walk.node.run_out()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            walk.node.close()
        for attempt in walk.asked:
            assert len(ends(walk.node, attempt)) in (1, 2), "PrefillDone may come before it is stopped"
