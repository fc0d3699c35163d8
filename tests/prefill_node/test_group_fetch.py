"""A prefill node of several ranks reads a prefix once, each rank a block, and uses nothing unverified."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from control.messages import AttemptId, FetchDone, FetchRequest, Quiesced
from prefill_node import division
from prefill_node.attempt import HeldState
from prefill_node.division import checksums_of_blocks, cut, divide
from prefill_node.fetch import WrongGrant, pieces
from ranks.barrier import GroupFailed
from tests.prefill_node.sending import LateChannel
from tests.prefill_node.test_fetch import FIRST, PREFIX, SENT_TO, Fetching
from tests.prefill_node.world import TOKEN_BYTES, live, states_of
from transfer.memory import Checksum, Checksums
from transfer.planner import expand_extents, expand_pages
from transfer.transports import NoRoute
from transfer.writer import Outcome

BLOCKS = (48, 48, 32)
"""Positions that each of three ranks reads of the prefix, in whole groups of 24 that have a digest."""


class GroupFetching(Fetching):
    """Three ranks that lack what their decode node has. It hashes 24 positions together, so the last group has 8."""

    digested_together = 24

    def __init__(self) -> None:
        super().__init__(world_size=3)

    @property
    def bytes_read(self) -> list[int]:
        """By each rank."""
        return [sum(int(batch.lengths.sum()) for batch in rank.reads.posted) for rank in self.all]

    def until_missing(self, attempt: AttemptId, *ranks: int) -> None:
        """Until all ranks but these have read their blocks."""
        fetch = self.held[attempt].fetch
        assert fetch is not None
        transfer = self.planner._dispatch._transfers[fetch.work or 0]
        self.turn_until(lambda: transfer.missing == set(ranks))

    def reading_seconds(self, attempt: AttemptId) -> float:
        fetch = self.held[attempt].fetch
        assert fetch is not None
        assert fetch.report is not None
        return fetch.report.seconds()

    def until_read(self, attempt: AttemptId) -> None:
        """Until they wait for the step that is under way, to exchange what they have."""
        self.turn_until(lambda: self.held[attempt].state is HeldState.READ)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[GroupFetching]:
    monkeypatch.setattr(division, "_MOST_ROWS", 30)
    yield from live(GroupFetching())


def test_each_rank_reads_a_block_and_every_rank_gets_all_of_them(node: GroupFetching) -> None:
    attempt = node.ask_and_grant()
    node.until(FetchDone, attempt)
    pages = node.held[attempt].pages
    assert pages is not None
    rows = expand_pages(pages, node.pool.page_size, 0, PREFIX)
    states = torch.tensor(states_of(FIRST)[:PREFIX], dtype=torch.uint8)[:, None]
    node.finish(attempt, computed=72)
    for pool in (node.pool, *(other.pool for other in node.others)):
        for layer, added in zip((*pool.kv, *pool.index_keys), (0, 1, 0), strict=True):
            assert torch.equal(layer[rows], (states + added).expand(-1, layer.shape[1]))
    assert node.bytes_read == [block * TOKEN_BYTES for block in BLOCKS], "the bytes cross the network once"
    assert node.metric("prefix_fetched_bytes_total") == PREFIX * TOKEN_BYTES
    assert node.metric("prefix_fetched_tokens_total") == PREFIX
    assert [other.model.tokens for other in node.others] == [72, 72], "they have what the tokens behind depend on"
    again = node.ask(FIRST[:200], PREFIX, SENT_TO)
    assert node.done(again).cached_tokens == 192
    node.release(again)


def test_what_one_digest_covers_is_read_by_one_rank(node: GroupFetching) -> None:
    node.digested_together = 1024
    attempt = node.ask_and_grant()
    node.finish(attempt, computed=72)
    assert sorted(node.bytes_read) == [0, 0, PREFIX * TOKEN_BYTES]


# --- what is not brought is computed ---


def another_byte(node: GroupFetching, asked: FetchRequest) -> None:
    """In the block of rank 2."""
    node.planner.fetch_answered(node.grant(asked, spoilt=True))


def a_failed_read(node: GroupFetching, asked: FetchRequest) -> None:
    node.others[0].reads.outcomes = [Outcome.LANDED, Outcome.FAILED]
    node.planner.fetch_answered(node.grant(asked))


def no_route_from_a_rank(node: GroupFetching, asked: FetchRequest) -> None:
    def connect() -> LateChannel:
        raise NoRoute("another host")

    node.others[1].connect_reads = connect
    node.planner.fetch_answered(node.grant(asked))


def no_digest(node: GroupFetching, asked: FetchRequest) -> None:
    node.planner.fetch_answered(node.grant(asked).model_copy(update={"checksums": Checksums()}))


def too_late(node: GroupFetching, asked: FetchRequest) -> None:
    """A rank is still reading."""
    reads = node.others[0].reads
    reads.hold = threading.Event()
    node.planner.fetch_answered(node.grant(asked))
    node.until_missing(asked.attempt, 1)
    node.be_late()
    reads.hold.set()


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        (another_byte, "checksum"),
        (a_failed_read, "read"),
        (no_route_from_a_rank, "read"),
        (no_digest, "checksum"),
        (too_late, "timeout"),
    ],
)
def test_a_prefix_of_which_a_rank_lacks_its_block_is_computed_and_nothing_of_it_is_gathered(
    node: GroupFetching, what: Callable[[GroupFetching, FetchRequest], None], failure: str
) -> None:
    attempt, asked = node.ask_fetching()
    what(node, asked)
    node.until(FetchDone, attempt)
    node.lend()
    node.finish(attempt, computed=200)
    assert node.failures(failure) == 1
    assert node.metric("prefix_fetched_tokens_total") == 0
    assert node.exchange.gathers == 0


# --- nothing is said before every rank has said so ---


def test_what_was_read_for_an_attempt_that_is_aborted_meanwhile_is_not_gathered(node: GroupFetching) -> None:
    """A step is under way when all has been read, and would go first."""
    node.model.before_pass = node.hold.wait
    other = node.ask([9] * 40, 0, ((800, 40),))
    node.turn_until(lambda: node.planner._running is not None)
    attempt = node.ask_and_grant()
    node.until_read(attempt)
    assert not node.told(FetchDone), "no rank has all of it"
    node.stop(attempt)
    node.until(Quiesced, attempt)
    node.hold.set()
    node.done(other)
    node.release(other)
    assert node.exchange.gathers == 0
    node.cache.check_idle()


def test_the_cost_of_a_fetch_includes_the_gather_and_not_the_step_before_it(
    node: GroupFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[float] = []
    monkeypatch.setattr(node.fetches.fetch_costs, "observe", lambda *observed: learned.append(observed[-1]))
    node.model.before_pass = node.hold.wait
    other = node.ask([9] * 40, 0, ((800, 40),))
    node.turn_until(lambda: node.planner._running is not None)
    attempt = node.ask_and_grant()
    node.until_read(attempt)
    reading = node.reading_seconds(attempt)
    node.hold.set()
    node.until(FetchDone, attempt)
    [seconds] = learned
    assert reading < seconds < node.metric("prefix_fetch_seconds_sum")
    node.done(other)
    node.release(other)


def test_a_fetch_of_which_a_rank_has_ended_never_ends_and_the_node_does(node: GroupFetching) -> None:
    reads = node.others[0].reads
    reads.hold = threading.Event()
    attempt = node.ask_and_grant()
    node.ranks.ended = 1
    with pytest.raises(GroupFailed, match="rank 1 ended"):
        node.tell()
    reads.hold.set()
    node.stop(attempt)
    node.tell()
    assert not node.told(FetchDone)
    assert not node.told(Quiesced)


def test_ranks_that_cannot_gather_end_the_node(node: GroupFetching) -> None:
    def fail(prefixes: object) -> None:
        raise RuntimeError("a lost connection")

    for each in node.all:
        each.worker._gather = fail  # type: ignore[assignment]
    node.ask_and_grant()
    with pytest.raises(GroupFailed, match="rank 0 failed in step 1: gathering failed: a lost connection"):
        node.turn_until(lambda: False)
    for other in node.others:
        node.turn_until(lambda other=other: "a lost connection" in (other.failed or ""))  # type: ignore[misc]


def test_a_rank_that_has_fallen_behind_reads_when_its_steps_can_not_write_to_those_pages_any_more(
    node: GroupFetching,
) -> None:
    """Rank 0 has ended a step, and has given its pages to others."""
    behind = node.others[0]
    held = threading.Event()
    behind.model.before_pass = held.wait
    node.done(first := node.ask([9], 0, ((800, 1),)))
    node.release(first)
    attempt = node.ask_and_grant()
    node.until_missing(attempt, 1)
    assert behind.reads.posted == []
    held.set()
    assert node.done(attempt).cached_tokens == PREFIX
    node.check_sent()
    node.release(attempt)


# --- division ---


def checksums(*groups: tuple[int, int, int]) -> Checksums:
    return Checksums.of([Checksum(buffer, start, stop, 0) for buffer, start, stop in groups])


def test_blocks_begin_where_a_digest_begins_in_every_buffer() -> None:
    groups = [(0, s, min(s + 10, 95)) for s in range(5, 95, 10)] + [(1, s, min(s + 20, 95)) for s in range(5, 95, 20)]
    assert divide(checksums(*groups), 5, 95, 2) == (5, 45, 95)
    assert divide(checksums(*groups), 5, 95, 4) == (5, 25, 45, 65, 95)
    assert divide(checksums(*groups), 5, 95, 16)[::4] == (5, 25, 45, 65, 95)
    blocks = checksums_of_blocks(checksums(*groups), (5, 45, 45, 95))
    assert [sorted(zip(b.buffers, b.starts, strict=True)) for b in blocks] == [
        [(0, 5), (0, 15), (0, 25), (0, 35), (1, 5), (1, 25)],
        [],
        [(0, 45), (0, 55), (0, 65), (0, 75), (0, 85), (1, 45), (1, 65), (1, 85)],
    ]


@pytest.mark.parametrize(
    "groups",
    [
        [(0, 0, 10), (0, 10, 20)],
        [(0, 0, 10), (0, 10, 20), (1, 0, 10)],
        [(0, 0, 10), (0, 10, 20), (1, 0, 10), (1, 10, 20), (1, 20, 30)],
        [(0, 0, 12), (0, 10, 20), (1, 0, 10), (1, 10, 20)],
        [(0, 0, 10), (0, 10, 20), (1, 0, 10), (1, 10, 20), (7, 0, 10), (7, 10, 20)],
    ],
)
def test_digests_that_do_not_cover_what_is_read_are_refused_by_a_rank(groups: list[tuple[int, int, int]]) -> None:
    found = checksums(*groups)
    bounds = divide(found, 0, 20, 2)

    def read_blocks() -> None:
        for block, (start, stop) in zip(checksums_of_blocks(found, bounds), pairwise(bounds), strict=True):
            if start < stop:
                list(pieces(block, start, stop, (1, 1), 100, order=(0, 1)))

    with pytest.raises(WrongGrant):
        read_blocks()


def test_what_is_gathered_at_once_is_bounded_and_is_every_position_once() -> None:
    found = list(cut((3, 3, 80, 100), 30))
    assert found == [
        [range(3, 3), range(3, 33), range(80, 100)],
        [range(3, 3), range(33, 63), range(100, 100)],
        [range(3, 3), range(63, 80), range(100, 100)],
    ]
    assert np.array_equal(
        np.unique(expand_extents(tuple((r.start, len(r)) for step in found for r in step))), range(3, 100)
    )
