"""A decode node may stop an attempt at any moment, and that costs no other attempt and no page."""

import random
from collections.abc import Callable, Sequence

import pytest

from control.messages import AttemptId, FetchGrant, FetchRefused, FetchRequest, PrefillDone, Quiesced
from control.messages import PrefillFailed as Failed
from prefill_node.attempt import HeldState
from prefill_node.costs import ComputeCost
from prefill_node.orders import Step
from tests.prefill_node.world import DECODE, R, World, new_cache, request
from transfer.memory import BufferInfo, Checksum, Checksums

TOKENS = [(7 * i + i // 10) % 100 for i in range(200)]
BUFFERS = BufferInfo(ptrs=(1, 2, 3), lengths=(16000, 16000, 8000), item_lengths=(16, 16, 8))


class SlowPasses(ComputeCost):
    """The estimate that a pass takes long, whatever passes take: attempts join one as soon as one layer is here."""

    def of_pass(self, start: int, stop: int) -> float:
        return 1e9

    def observe(self, ranges: Sequence[tuple[int, int]], seconds: float) -> None:
        pass


class Stopping(World):
    """Fetches whatever it may. Steps begin with every turn."""

    def __init__(self, world_size: int = 1, num_pages: int = 48) -> None:
        super().__init__(world_size, new_cache(num_pages), chunk_size=64, fetch_policy="always")
        self.planner._start_step = self._start_step  # type: ignore[method-assign]
        self.fetches.compute_cost = SlowPasses(64)
        self.missed: set[int | None] = set()
        """Prefixes that were not there in time for a step."""
        self._asked = 0

    def ask(self, tokens: Sequence[int], start: int = 0) -> AttemptId:
        self._asked += 1
        attempt = R._replace(request_id=f"r{self._asked}")
        extents, to = ((0, len(tokens) - start),), request().destination.model_copy(update={"buffers": BUFFERS})
        self.endpoint._take(
            DECODE, request(attempt=attempt, token_ids=tuple(tokens), start=start, extents=extents, destination=to)
        )
        return attempt

    @property
    def open_questions(self) -> list[FetchRequest]:
        return [message for message in self.repeated if isinstance(message, FetchRequest)]

    def answer(self, asked: FetchRequest, is_granted: bool) -> None:
        if not is_granted:
            self.endpoint._take(DECODE, FetchRefused(attempt=asked.attempt, reason="it is not here any more"))
            return
        each = max(1, (asked.stop - asked.start) // 4)
        starts = range(asked.start, asked.stop, each)
        rows = [Checksum(b, at, min(at + each, asked.stop), 0) for b in range(3) for at in starts]
        grant = FetchGrant(
            attempt=asked.attempt,
            start=asked.start,
            stop=asked.stop,
            extents=((0, asked.stop - asked.start),),
            checksums=Checksums.of(rows),
        )
        self.endpoint._take(DECODE, grant)

    def end_step(self, error: str | None = None) -> None:
        """A step counts for nothing of an attempt whose prefix is still being read."""
        assert self.step is not None
        chunks = self.step.chunks if isinstance(self.step, Step) else ()
        reading = {read.work for read in self.workers[0].reads}
        awaited = {number for number, chunk in enumerate(chunks) if chunk.awaits in reading}
        self.missed |= {chunks[number].awaits for number in awaited}
        self.finish(error, void=frozenset(awaited))

    def end_read(self, rank: int = 0, at: int = 0, error: str | None = None) -> None:
        read = self.workers[rank].reads[at]
        if read.work in self.workers[rank].cancelled:
            error = error or "not wanted any more"
        self.read(rank, at, error=error, in_time=error is None and read.work not in self.missed)

    def ends(self, attempt: AttemptId) -> list[type]:
        """How an attempt ended, as the decode node was told."""
        kinds = (PrefillDone, Quiesced)
        return [
            type(update)
            for update in self.updates
            if update.attempt == attempt
            and (isinstance(update, kinds) or (isinstance(update, Failed) and not update.in_flight))
        ]

    def run_out(self) -> None:
        """Everything ends well; afterwards the node must be idle, with all of its pages."""
        for _ in range(1000):
            self.tell()
            if not self.held:
                break
            for asked in self.open_questions:
                self.answer(asked, is_granted=True)
            for rank, worker in enumerate(self.workers):
                while worker.reads:
                    self.end_read(rank)
            if self.step is not None:
                self.end_step()
            for rank, worker in enumerate(self.workers):
                while worker.writes:
                    self.sent(rank)
            for attempt in list(self.held.values()):
                if self.planner.release(attempt):
                    self.endpoint._finish(attempt)
        assert not self.held
        assert self.step is None
        self.cache.check_idle()
        self.prefixes.check_integrity()


class Walk:
    """Attempts that share prefixes wait, fetch, join steps and send, in a random order of events."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.node = Stopping(world_size, num_pages=40)
        self.asked: list[AttemptId] = []
        self._rng = random.Random(seed)

    def step(self) -> None:
        """One thing happens of those that may, and usually the loop turns."""
        node, pick = self.node, self._rng
        held = list(node.held.values())
        reads = [(rank, at) for rank, worker in enumerate(node.workers) for at in range(len(worker.reads))]
        writes = [(rank, at) for rank, worker in enumerate(node.workers) for at in range(len(worker.writes))]
        may: list[tuple[Callable[[], object], int]] = [(self._ask, 3)]
        if held:
            reason = pick.choice([None, "the decode node is gone"])
            may.append((lambda: node.planner.stop(pick.choice(held), reason), 2))
            may.append((lambda: self._release(pick.choice(held)), 1))
        if node.open_questions:
            may.append((lambda: node.answer(pick.choice(node.open_questions), pick.random() < 0.8), 4))
            may.append((node.be_late, 1))
        if reads:
            may.append((lambda: node.end_read(*pick.choice(reads), self._error()), 3))
            if len(node.workers) == 1:
                may.append((lambda: node.layers_come(pick.choice(reads)[1]), 3))
        if node.step is not None:
            may.append((lambda: node.end_step(self._error() if len(node.workers) == 1 else None), 3))
        if writes:
            may.append((lambda: node.sent(*pick.choice(writes), error=self._error()), 3))
        [act] = pick.choices([act for act, _ in may], [weight for _, weight in may])
        act()
        if pick.random() < 0.7:
            node.tell()
            assert all(each.in_flight or each.state is not HeldState.STOPPING for each in node.held.values())
            self._check_quiet()
        node.prefixes.check_integrity()

    def _check_quiet(self) -> None:
        """Nothing is written or read for an attempt that is said to have ended."""
        node = self.node
        blocks = [block.attempt for worker in node.workers for block in (*worker.writes, *worker.reads)]
        assert not any(node.ends(attempt) in ([Quiesced], [Failed]) for attempt in blocks)

    def _error(self) -> str | None:
        return "it failed" if self._rng.random() < 0.15 else None

    def _ask(self) -> None:
        tokens = TOKENS[: self._rng.choice([64, 128, 200])] + [len(self.asked) % 100] * 200
        length, start = self._rng.choice([100, 128, 200]), self._rng.choice([0, 70, 99, 99])
        self.asked.append(self.node.ask(tokens[:length], start))

    def _release(self, attempt: object) -> None:
        for each in self.node.held.values():
            if each is attempt and self.node.planner.release(each):
                self.node.endpoint._finish(each)
                return


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_pages_come_back_whenever_attempts_are_stopped(world_size: int) -> None:
    for seed in range(40):
        walk = Walk(world_size, seed)
        try:
            for _ in range(60):
                walk.step()
            walk.node.run_out()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        for attempt in walk.asked:
            assert len(walk.node.ends(attempt)) in (1, 2), "PrefillDone may come before it is stopped"
