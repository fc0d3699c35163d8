"""Ranks agree on each step, and none waits for one that is gone."""

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from base.phase import Phase
from ranks import barrier
from ranks.barrier import SPIN_BEFORE_SLEEP_S, GroupBarrier, GroupFailed
from ranks.status import SharedStatus
from ranks.watch import RankWatch
from tests.ranks.ranks_harness import FakeWatch

Make = Callable[..., list[GroupBarrier]]


@pytest.fixture
def status() -> Iterator[SharedStatus]:
    fd = SharedStatus.create(4)
    yield SharedStatus(fd, 4)
    os.close(fd)


@pytest.fixture
def make(status: SharedStatus) -> Iterator[Make]:
    """A function that makes the barriers of four ranks, for a thread each."""
    wakeup_fds = tuple(os.eventfd(0) for _ in range(4))

    def barriers(dead: Callable[[], int | None] = lambda: None, timeout: float = 20.0) -> list[GroupBarrier]:
        return [GroupBarrier(status, rank, wakeup_fds, FakeWatch(dead), timeout) for rank in range(4)]

    yield barriers
    for wakeup_fd in wakeup_fds:
        os.close(wakeup_fd)


def test_the_largest_post_of_a_round_is_told_once_all_ranks_have_posted(status: SharedStatus) -> None:
    for number, batches in enumerate(([3, 0, 9, 1], [0, 0, 0, 2], [8, 7, 6, 5]), start=1):
        assert not status.anybody_posted(number)
        for rank, batch in enumerate(batches):
            assert status.largest_posted(number) is None
            status.post(rank, number, batch)
            assert status.anybody_posted(number)
        assert status.largest_posted(number) == max(batches)
        assert [status.posted(rank, number) for rank in range(4)] == batches


def test_every_rank_hears_the_largest_batch_of_every_step(make: Make) -> None:
    """Ranks with requests, ranks without, and ranks that come late, as each likes."""
    barriers, steps = make(), 300
    choice = random.Random(0)
    wanted = [[choice.choice([0, 0, 3, 5, rank + 1]) for _ in range(steps)] for rank in range(4)]
    for step in range(steps):  # one that nobody wants is none
        wanted[step % 4][step] = max(1, wanted[step % 4][step])

    def run(rank: int) -> list[int]:
        rng, mine, agreed = random.Random(rank), wanted[rank], []
        while len(agreed) < steps:
            if rng.random() < 0.05:
                time.sleep(rng.random() * 2e-3)
            if result := barriers[rank].wait(mine[len(agreed)]):
                agreed.append(result)
        return agreed

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    assert results == [[max(each) for each in zip(*wanted, strict=True)]] * 4


def test_a_rank_that_ended_is_named_at_once_even_if_nobody_has_work(make: Make) -> None:
    first, *_ = make(dead=lambda: 3)
    for batch in (0, 2):
        started = time.monotonic()
        with pytest.raises(GroupFailed, match=r"^rank 3 ended$"):
            first.wait(batch)
        assert time.monotonic() - started < 1


def test_a_rank_that_comes_while_its_absence_is_found_is_not_missed(make: Make, status: SharedStatus) -> None:
    first, *_ = make(timeout=0.0)

    def posted(rank: int, number: int) -> int | None:
        """All others come right before the look at who is missing."""
        for other in range(1, 4):
            status.post(other, number, 2)
        return SharedStatus.posted(status, rank, number)

    status.posted = posted  # type: ignore[method-assign]
    assert first.wait(1) == 2


def test_the_group_is_as_far_as_the_rank_that_is_farthest(status: SharedStatus) -> None:
    for rank, phase in ((2, Phase.DRAINING), (1, Phase.ENDING)):
        status.set_phase(rank, phase)
        assert status.phase() is phase


def test_a_rank_spins_before_sleep_only_while_the_group_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    barriers = make()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: each.wait(1), barriers))
    now = stepped_at = barriers[0]._stepped_at

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(barrier, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert not barriers[0].spin_before_sleep(lambda: False)
    assert now - stepped_at == pytest.approx(SPIN_BEFORE_SLEEP_S, rel=0.01)
    before = now
    assert not barriers[0].spin_before_sleep(lambda: False)
    assert now == before, "the group has not stepped since"


def test_a_rank_that_sleeps_is_woken_by_one_that_calls_it() -> None:
    wakeup_fds = (os.eventfd(0), os.eventfd(0))
    two = SharedStatus(fd := SharedStatus.create(2), 2)
    first, second = (GroupBarrier(two, rank, wakeup_fds, FakeWatch(), 10) for rank in range(2))
    woken = threading.Event()
    # Of a process that lives: this one.
    watch = RankWatch(two, 1, wakeup_fds[1], (os.getpid(), os.getpid()), 60, woken.set)
    assert not second.spin_before_sleep(lambda: False)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(first.wait, 2)
        assert woken.wait(5)
        assert second.wait(0) == calling.result() == 2
    watch.stop()
    for descriptor in (*wakeup_fds, fd):
        os.close(descriptor)


def test_a_rank_that_ended_before_it_was_watched_is_dead(status: SharedStatus) -> None:
    """Its own reason is the one to be said."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    wakeup_fd = os.eventfd(0)
    watch = RankWatch(status, 0, wakeup_fd, (os.getpid(), ended.pid), 60, lambda: None)
    assert watch.dead() == 1
    watch.stop()
    os.close(wakeup_fd)


def test_a_reason_is_kept_whole_and_once(status: SharedStatus) -> None:
    assert status.reported(1) is None
    status.report(1, "rank 1: " + "ü" * 2000)
    said = status.reported(1)
    assert said is not None
    assert said[0].startswith("rank 1: üüü")
    assert said[1] == 1
    status.report(1, "something else", 2)
    assert status.reported(1) == said
    assert status.reported(0) is None
    assert status.reported(2) is None


def test_a_status_says_who_was_reported_first_and_who_is_done(status: SharedStatus) -> None:
    assert status.first_reported(range(4)) is None
    status.report(2, "rank 2 on host 1 closed its connection")
    status.report(1, "rank 1 on host 0 closed its connection")
    assert [status.first_reported(ranks) for ranks in (range(4), [0, 1])] == [2, 1]
    assert not status.done(0)
    status.set_done(0)
    assert status.done(0)
    assert status.phase_of(1) is Phase.SERVING
