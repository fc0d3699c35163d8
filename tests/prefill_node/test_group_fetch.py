"""A prefill node of several ranks reads a prefix once, each rank a block, and uses nothing unverified."""

import threading
from collections.abc import Iterator

import pytest
import torch

from control.messages import FetchDone, Quiesced
from prefill_node import division
from ranks.barrier import GroupFailed
from tests.prefill_node.fetching import FIRST, PREFIX, SENT_TO, GroupFetching
from tests.prefill_node.world import TOKEN_BYTES, live, states_of
from transfer.planner import expand_pages

BLOCKS = (48, 48, 32)
"""Positions that each of three ranks reads of the prefix, in whole groups of 24 that have a digest."""


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


def test_what_was_read_for_an_aborted_attempt_is_not_gathered(node: GroupFetching) -> None:
    """A step is under way when all has been read, and would go first."""
    other, attempt = node.read_during_a_step()
    assert not node.told(FetchDone), "no rank has all of it"
    node.stop(attempt)
    node.until(Quiesced, attempt)
    node.hold.set()
    node.done(other)
    node.release(other)
    assert node.exchange.gathers == 0
    node.cache.check_idle()


def test_the_cost_of_a_fetch_includes_the_gather_and_not_the_step(
    node: GroupFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[float] = []
    monkeypatch.setattr(node.fetches.fetch_costs, "observe", lambda *observed: learned.append(observed[-1]))
    other, attempt = node.read_during_a_step()
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


def test_a_rank_reads_after_its_steps_that_may_write_to_those_pages(node: GroupFetching) -> None:
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
