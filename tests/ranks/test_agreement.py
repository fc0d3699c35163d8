"""Ranks agree on each step, and none waits for one that is gone."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ranks import agreement
from ranks.agreement import LINGER_S, Agreed, Agreement, GroupFailed
from ranks.group_table import GroupTable, Standing
from ranks.rank_watch import RankWatch

Make = Callable[..., list[Agreement]]


@pytest.fixture
def table() -> Iterator[GroupTable]:
    fd = GroupTable.create(4)
    yield GroupTable(fd, 4)
    os.close(fd)


@pytest.fixture
def make(table: GroupTable) -> Iterator[Make]:
    """A function that makes the agreements of four ranks, for a thread each."""
    bells = tuple(os.eventfd(0) for _ in range(4))

    def agreements(dead: Callable[[], int | None] = lambda: None, timeout: float = 20.0) -> list[Agreement]:
        return [Agreement(table, rank, bells, dead, timeout) for rank in range(4)]

    yield agreements
    for bell in bells:
        os.close(bell)


def test_the_largest_post_of_a_round_is_told_once_all_ranks_have_posted(table: GroupTable) -> None:
    for number, batches in enumerate(([3, 0, 9, 1], [0, 0, 0, 2], [8, 7, 6, 5]), start=1):
        assert not table.anybody_posted(number)
        for rank, batch in enumerate(batches):
            assert table.largest_posted(number) is None
            table.post(rank, number, batch)
            assert table.anybody_posted(number)
        assert table.largest_posted(number) == max(batches)
        assert [table.posted(rank, number) for rank in range(4)] == batches


def test_where_nobody_has_work_nobody_waits(make: Make) -> None:
    first, *_ = make()
    assert first.agree(0) == Agreed(0, Standing.SERVING)
    assert first.round == 0


def test_every_rank_hears_the_largest_batch_of_every_step(make: Make) -> None:
    """Ranks with requests, ranks without, and ranks that come late, as each likes."""
    agreements, steps = make(), 300
    choice = random.Random(0)
    wanted = [[choice.choice([0, 0, 3, 5, rank + 1]) for _ in range(steps)] for rank in range(4)]
    for step in range(steps):  # one that nobody wants is none
        wanted[step % 4][step] = max(1, wanted[step % 4][step])

    def run(rank: int) -> list[int]:
        rng, mine, agreed = random.Random(rank), wanted[rank], []
        while len(agreed) < steps:
            if rng.random() < 0.05:
                time.sleep(rng.random() * 2e-3)
            if (result := agreements[rank].agree(mine[len(agreed)])).batch:
                agreed.append(result.batch)
        return agreed

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    assert results == [[max(each) for each in zip(*wanted, strict=True)]] * 4


def test_a_rank_that_does_not_come_is_named(make: Make) -> None:
    first, second, *_ = make(timeout=0.3)
    with ThreadPoolExecutor(2) as pool:
        failures = [pool.submit(agreement.agree, 1).exception() for agreement in (first, second)]
    for failure in failures:
        assert isinstance(failure, GroupFailed)
    assert str(failures[1]) == "rank 2 did not come to step 1 within 0.3 s"


def test_a_rank_that_ended_is_named_at_once_even_if_nobody_has_work(make: Make) -> None:
    first, *_ = make(dead=lambda: 3)
    for batch in (0, 2):
        started = time.monotonic()
        with pytest.raises(GroupFailed, match=r"^rank 3 ended$"):
            first.agree(batch)
        assert time.monotonic() - started < 1


def test_a_rank_that_ends_while_others_wait_for_it(make: Make) -> None:
    ended: list[int] = []
    first, *_ = make(dead=lambda: ended[0] if ended else None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.agree, 1)
        time.sleep(0.1)
        assert not waiting.done()
        ended.append(2)
        assert isinstance(waiting.exception(timeout=2), GroupFailed)


def test_the_group_is_as_far_as_the_rank_that_is_farthest(make: Make, table: GroupTable) -> None:
    first, *_ = make()
    table.set_standing(2, Standing.DRAINING)
    assert first.agree(0).standing is Standing.DRAINING
    table.set_standing(1, Standing.ENDING)
    assert first.agree(0).standing is Standing.ENDING


def test_a_rank_lingers_only_while_the_group_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agreements = make()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda agreement: agreement.agree(1), agreements))
    now = stepped_at = agreements[0]._stepped_at

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert not agreements[0].linger(lambda: False)
    assert now - stepped_at == pytest.approx(LINGER_S, rel=0.01)
    before = now
    assert not agreements[0].linger(lambda: False)
    assert now == before, "the group has not stepped since"


def test_a_rank_that_sleeps_is_woken(table: GroupTable) -> None:
    """At once, and not when its pause is over."""
    bells = (os.eventfd(0), os.eventfd(0))
    two = GroupTable(fd := GroupTable.create(2), 2)
    woken = threading.Event()
    first = Agreement(two, 0, bells, lambda: None, 10)
    second = Agreement(two, 1, bells, lambda: None, 10)
    # Of a process that lives: this one.
    watch = RankWatch(two, 1, bells[1], (os.getpid(), os.getpid()), 60, woken.set, pytest.fail)
    latencies = []
    try:
        for _ in range(50):
            woken.clear()
            time.sleep(0.01)
            two.set_asleep(1, True)
            with ThreadPoolExecutor(1) as pool:
                started = time.monotonic()
                calling = pool.submit(first.agree, 2)
                assert woken.wait(5)
                assert second.agree(0).batch == 2
                latencies.append(time.monotonic() - started)
                assert calling.result().batch == 2
    finally:
        watch.stop()
        for descriptor in (*bells, fd):
            os.close(descriptor)
    print(f"woken within {sorted(latencies)[25] * 1e3:.2f} ms, median")
    assert sorted(latencies)[25] < 0.02


def test_a_reason_is_kept_whole_and_once(table: GroupTable) -> None:
    assert table.reported(1) is None
    table.report(1, "rank 1: " + "ü" * 2000)
    said = table.reported(1)
    assert said is not None
    assert said[0].startswith("rank 1: üüü")
    assert said[1] == 1
    table.report(1, "something else", 2)
    assert table.reported(1) == said
    assert table.reported(0) is None
    assert table.reported(2) is None
