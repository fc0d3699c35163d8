"""A prefill node reads prefixes back from decode nodes: what matches its digests is used, and all else is computed."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from control.messages import AttemptId, FetchDone, FetchGrant, FetchRefused, FetchRequest, PrefillFailed, Quiesced
from kvcache.page_cache import PageCache
from prefill_node.config import FetchPolicy
from prefill_node.costs import ComputeCost, FetchCosts
from prefill_node.fetch import WrongGrant, pieces
from prefill_node.prefixes import LEAST_TOKENS
from tests.prefill_node.sending import LateChannel
from tests.prefill_node.world import TOKEN_BYTES, UNTOUCHED, LiveWorld, live, new_cache, states_of
from transfer.checksum import GROUP_POSITIONS, digests
from transfer.memory import Checksum, Checksums
from transfer.planner import expand_extents
from transfer.transports import NoRoute
from transfer.writer import Outcome

FIRST = [(7 * i + i // 10) % 100 for i in range(200)]
PREFIX = 128
LENT = ((300, 20), (20, 80), (500, 28))
"""Slots at the decode node of the first 128 positions."""
SENT_TO = ((700, 40), (3, 40))


class Held(threading.Event):
    """Says when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


class Fetching(LiveWorld):
    """A prefill node whose decode node has the KV of the first 128 tokens of FIRST."""

    digested_together = GROUP_POSITIONS

    def __init__(
        self,
        fetch_policy: FetchPolicy = "always",
        world_size: int = 1,
        cache: PageCache | None = None,
        **of_model: Any,
    ) -> None:
        super().__init__(cache or new_cache(48), fetch_policy=fetch_policy, world_size=world_size, **of_model)
        self.lend()

    def lend(self) -> None:
        states = torch.tensor(states_of(FIRST)[:PREFIX], dtype=torch.uint8)
        for layer, added in zip(self.slots.layers, (0, 1, 0), strict=True):
            layer[expand_extents(LENT)] = (states + added)[:, None]

    def ask_fetching(self, length: int = 200, start: int = PREFIX) -> tuple[AttemptId, FetchRequest]:
        attempt = self.ask(FIRST[:length], start, SENT_TO)
        return attempt, self.until(FetchRequest, attempt)

    def ask_and_grant(self) -> AttemptId:
        attempt, asked = self.ask_fetching()
        self.planner.fetch_answered(self.grant(asked))
        return attempt

    def grant(self, asked: FetchRequest, spoilt: bool = False) -> FetchGrant:
        slots, each = expand_extents(LENT)[asked.start : asked.stop], self.digested_together
        groups = [(first, slots[first : first + each]) for first in range(0, len(slots), each)]
        buffers = self.slots.destination.buffers
        found = [one for first, group in groups for one in digests(buffers, group, asked.start + first)]
        if spoilt:
            self.slots.layers[2][slots[-1]] += 1
        extents = tuple((int(slot), 1) for slot in slots)
        return FetchGrant(
            attempt=asked.attempt,
            start=asked.start,
            stop=asked.stop,
            extents=extents,
            checksums=Checksums.of(found),
        )

    def check_sent(self, length: int = 200) -> None:
        """What was sent is the KV of the tokens behind the prefix, which depends on the KV of the prefix."""
        slots = expand_extents(SENT_TO)[: length - PREFIX]
        states = torch.tensor(states_of(FIRST)[PREFIX:length], dtype=torch.uint8)
        for layer, added in zip(self.slots.layers, (0, 1, 0), strict=True):
            assert torch.equal(layer[slots], (states + added)[:, None].expand(-1, layer.shape[1]))

    def finish(self, attempt: AttemptId, computed: int, length: int = 200) -> None:
        """The prompt is prefilled as always, with so many tokens computed."""
        done = self.done(attempt)
        self.check_sent(length)
        self.release(attempt)
        assert self.model.tokens == computed
        assert done.cached_tokens == length - computed
        self.cache.check_idle()
        assert self.metric("requests", state="fetching") == 0

    def failures(self, reason: str) -> float:
        return self.metric("prefix_fetch_failures_total", reason=reason)


@pytest.fixture
def node() -> Iterator[Fetching]:
    yield from live(Fetching())


def test_what_was_fetched_is_not_computed_and_is_cached_as_if_it_were(node: Fetching) -> None:
    attempt, asked = node.ask_fetching()
    assert (asked.start, asked.stop) == (0, PREFIX)
    assert node.metric("requests", state="fetching") == 1
    node.planner.fetch_answered(node.grant(asked))
    node.until(FetchDone, attempt)
    node.finish(attempt, computed=72)
    assert node.metric("prefix_fetched_tokens_total") == PREFIX
    assert node.metric("prefix_fetched_bytes_total") == PREFIX * TOKEN_BYTES
    assert node.metric("prefix_cache_hits_total", side="prefill") == 0, "it was not there"
    kinds = [type(update) for update in node.updates if update.attempt == attempt]
    assert kinds.index(FetchRequest) < kinds.index(FetchDone)
    again = node.ask(FIRST[:200], PREFIX, SENT_TO)
    assert node.done(again).cached_tokens == 192, "all whole blocks"
    node.release(again)


def test_only_what_is_missing_in_the_cache_is_asked_for(node: Fetching) -> None:
    node.fetches.policy = "never"
    node.run(FIRST[:64])
    node.fetches.policy = "always"
    node.lend()
    attempt, asked = node.ask_fetching()
    assert (asked.start, asked.stop) == (64, PREFIX)
    node.planner.fetch_answered(node.grant(asked))
    node.done(attempt)
    assert node.model.tokens == 64 + 72
    short = node.ask([*FIRST[:128], *FIRST[:20]], LEAST_TOKENS - 1 + 128 - 64, SENT_TO)
    node.done(short)
    assert not node.told(FetchRequest, short)


def test_others_compute_while_a_job_waits_for_its_prefix(node: Fetching) -> None:
    attempt, asked = node.ask_fetching()
    other = node.ask([9] * 40, 0, ((800, 40),))
    node.done(other)
    assert node.model.tokens == 40
    node.planner.fetch_answered(node.grant(asked))
    node.done(attempt)
    assert node.model.tokens == 40 + 72


def test_jobs_that_lack_the_same_prefix_fetch_it_once(node: Fetching) -> None:
    first, asked = node.ask_fetching()
    aborted, second = (node.ask([*FIRST[:150], 7, extra], PREFIX, ((800, 24),)) for extra in (1, 2))
    node.tell()
    assert node.metric("requests", state="fetching") == 3
    node.stop(aborted)
    node.planner.fetch_answered(node.grant(asked))
    assert node.done(second).cached_tokens == node.done(first).cached_tokens == PREFIX
    assert node.model.tokens == 72 + 24
    assert len(node.told(FetchRequest)) == 1
    assert node.metric("prefix_fetched_tokens_total") == PREFIX


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_job_that_waits_for_a_fetch_that_fails_asks_for_itself(node: Fetching, is_aborted: bool) -> None:
    first, asked = node.ask_fetching()
    second = node.ask([*FIRST[:150], 7], PREFIX, ((800, 23),))
    node.tell()
    if is_aborted:
        node.stop(first)
    else:
        refuse(node, asked)
    again = node.until(FetchRequest, second)
    node.planner.fetch_answered(node.grant(again))
    node.done(second)
    assert node.metric("prefix_fetched_tokens_total") == PREFIX


def refuse(node: Fetching, asked: FetchRequest) -> None:
    node.planner.fetch_answered(FetchRefused(attempt=asked.attempt, reason="it is not here any more"))


def other_bytes(node: Fetching, asked: FetchRequest) -> None:
    """A decode process that was replaced, say."""
    node.planner.fetch_answered(node.grant(asked, spoilt=True))


def no_digests(node: Fetching, asked: FetchRequest) -> None:
    node.planner.fetch_answered(node.grant(asked).model_copy(update={"checksums": Checksums()}))


def other_positions(node: Fetching, asked: FetchRequest) -> None:
    node.planner.fetch_answered(node.grant(asked).model_copy(update={"start": 1}))


def too_few_slots(node: Fetching, asked: FetchRequest) -> None:
    node.planner.fetch_answered(node.grant(asked).model_copy(update={"extents": ((0, 3),)}))


def slots_that_are_none(node: Fetching, asked: FetchRequest) -> None:
    node.planner.fetch_answered(node.grant(asked).model_copy(update={"extents": ((2000, 128),)}))


def a_failed_read(node: Fetching, asked: FetchRequest) -> None:
    """Half way."""
    node.reads.outcomes = [Outcome.LANDED, Outcome.FAILED]
    node.planner.fetch_answered(node.grant(asked))


def no_route(node: Fetching, asked: FetchRequest) -> None:
    def connect() -> LateChannel:
        raise NoRoute("another host")

    node.first.connect_reads = connect
    node.planner.fetch_answered(node.grant(asked))


def a_bug(node: Fetching, asked: FetchRequest) -> None:
    node.reads.max_bytes = None  # type: ignore[assignment]
    node.planner.fetch_answered(node.grant(asked))


def silence(node: Fetching, asked: FetchRequest) -> None:
    node.be_late()
    node.planner.fetch_answered(node.grant(asked))


def no_lease(node: Fetching, asked: FetchRequest) -> None:
    node.first.silence = 2.5
    node.planner.fetch_answered(node.grant(asked))
    time.sleep(0.1)
    assert node.reads.posted == [], "its address may be another process's"
    node.be_late()
    node.first.silence = 0.0


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        (refuse, "refused"),
        (other_positions, "refused"),
        (too_few_slots, "refused"),
        (slots_that_are_none, "refused"),
        (other_bytes, "checksum"),
        (no_digests, "checksum"),
        (a_failed_read, "read"),
        (no_route, "read"),
        (a_bug, "read"),
        (silence, "timeout"),
        (no_lease, "timeout"),
    ],
)
def test_what_is_not_brought_is_computed(
    node: Fetching, what: Callable[[Fetching, FetchRequest], None], failure: str
) -> None:
    attempt, asked = node.ask_fetching()
    what(node, asked)
    node.until(FetchDone, attempt)
    node.lend()
    node.finish(attempt, computed=200)
    assert node.failures(failure) == 1
    assert node.metric("prefix_fetched_tokens_total") == 0


def test_an_answer_that_comes_twice_or_late_changes_nothing(node: Fetching) -> None:
    attempt, asked = node.ask_fetching()
    grant = node.grant(asked)
    for _ in range(2):
        node.planner.fetch_answered(grant)
    refuse(node, asked)
    node.until(FetchDone, attempt)
    node.planner.fetch_answered(grant)
    node.finish(attempt, computed=72)
    node.planner.fetch_answered(grant)
    node.tell()


def test_an_attempt_that_is_aborted_is_quiet_when_its_reads_have_ended(node: Fetching) -> None:
    hold = node.reads.hold = Held()
    attempt = node.ask_and_grant()
    assert hold.reached.wait(10)
    node.stop(attempt)
    node.tell()
    assert not node.told(Quiesced), "a read is being posted"
    assert node.metric("prefill_pages", state="used") > 0
    hold.set()
    node.until(Quiesced, attempt)
    assert not node.told(FetchDone), "Quiesced says it"
    assert node.model.tokens == 0
    node.cache.check_idle()


def test_an_attempt_that_is_aborted_before_the_grant_is_quiet_at_once(node: Fetching) -> None:
    attempt, asked = node.ask_fetching()
    node.stop(attempt)
    node.until(Quiesced, attempt)
    node.planner.fetch_answered(node.grant(asked))
    node.tell()
    assert node.reads.posted == []
    node.cache.check_idle()


def test_a_read_of_unknown_end_keeps_its_pages_and_its_attempt_for_good(node: Fetching) -> None:
    node.reads.broken = "wait"
    attempt = node.ask_and_grant()
    failed = node.until(PrefillFailed, attempt)
    assert failed.in_flight
    assert "nobody knows whether a read has ended" in failed.reason
    node.first.reads = type(node.reads)("tcp")
    next_one = node.ask_and_grant()
    node.done(next_one)
    assert node.model.tokens == 72, "the next fetch gets a reader of its own"
    assert node.planner.progress((attempt,)).computed == ((attempt, 0),)
    assert not node.told(Quiesced)


def test_a_node_that_keeps_nothing_fetches_nothing() -> None:
    node = LiveWorld(new_cache(4, 128), fetch_policy="always")
    node.done(node.ask(FIRST[:200], PREFIX, SENT_TO))
    assert node.model.tokens == 200
    node.close()


# --- when ---


def test_it_fetches_where_that_is_estimated_to_be_faster_and_tries_again_later() -> None:
    node = Fetching("auto")
    fetches = node.fetches
    attempt = node.ask_and_grant()
    node.finish(attempt, computed=72)

    def prefill(computed: int) -> None:
        """Without a fetch."""
        node.cache.drop()
        before, tokens = len(node.updates), node.model.tokens
        node.done(attempt := node.ask(FIRST[:200], PREFIX, SENT_TO))
        assert not [update for update in node.updates[before:] if isinstance(update, FetchRequest)]
        assert node.model.tokens - tokens == computed
        node.release(attempt)

    for _ in range(5):
        fetches.fetch_costs.observe("decode", "tcp", PREFIX * TOKEN_BYTES, 10.0)
    prefill(200)
    later = time.monotonic() + 7200
    fetches.fetch_costs._models["decode"]._now = lambda: later
    for _ in range(40):
        fetches.compute_cost.observe([(0, 32)], 1.0)
    node.cache.drop()
    attempt, asked = node.ask_fetching()
    refuse(node, asked)
    node.done(attempt)
    node.release(attempt)
    prefill(200)
    node.close()


def test_another_decode_node_has_estimates_of_its_own() -> None:
    costs = FetchCosts(limit=2)
    for _ in range(10):
        costs.observe("slow", "tcp", 10**8, 30.0)
    assert costs.estimate("slow", "tcp", 10**8) > 10
    assert costs.estimate("other", "tcp", 10**8) < 1
    assert costs.estimate("third", "shm", 10**8) < costs.estimate("other", "tcp", 10**8)


def test_a_fetch_that_was_given_up_tells_how_long_what_had_come_took(
    node: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[int] = []
    costs = node.fetches.fetch_costs
    monkeypatch.setattr(costs, "observe", lambda _boot_id, _transport, num_bytes, _seconds: learned.append(num_bytes))
    held = node.reads.hold = Held()
    attempt = node.ask_and_grant()
    assert held.reached.wait(10)
    node.be_late()
    held.set()
    node.finish(attempt, computed=200)
    assert len(learned) == 1
    assert 0 < learned[0] < PREFIX * TOKEN_BYTES


def test_estimates_find_what_a_pass_a_token_and_a_position_cost() -> None:
    cost = ComputeCost(chunk_size=512)
    assert cost.saved(0, 1024, 2048) is None, "nothing was computed yet"

    def seconds(start: int, stop: int) -> float:
        return 0.01 + (stop - start) * (1e-5 + 2e-9 * (start + stop) / 2)

    rng = random.Random(3)
    for _ in range(60):
        start = rng.randrange(0, 60000)
        stop = start + rng.choice([64, 512, 300])
        cost.observe([(start, stop)], seconds(start, stop) * rng.uniform(0.95, 1.05))
    expected = sum(seconds(start, start + 512) for start in range(0, 32768, 512))
    found = cost.saved(0, 32768, 32868)
    assert found is not None
    assert found == pytest.approx(expected, rel=0.1)


def test_estimates_of_one_kind_of_pass_do_not_explain_it_by_less_than_its_tokens() -> None:
    cost = ComputeCost(chunk_size=512)
    for _ in range(5):
        cost.observe([(0, 512)], 1.0)
    found = cost.saved(0, 5120, 5200)
    assert found is not None
    assert 8 < found < 20


# --- what is read together ---


def checksum(buffer: int, start: int, stop: int) -> Checksum:
    return Checksum(buffer, start, stop, 0)


def test_groups_are_read_together_as_far_as_they_fit() -> None:
    rows = [checksum(b, s, min(s + GROUP_POSITIONS, 5000)) for b in (1, 0) for s in range(100, 5000, GROUP_POSITIONS)]
    found = list(pieces(Checksums.of(rows), 100, 5000, (10, 30), 3 * 10 * GROUP_POSITIONS, order=(1, 0)))
    assert [(piece.buffer, piece.start, piece.stop) for piece in found] == [
        *((1, start, min(start + GROUP_POSITIONS, 5000)) for start in range(100, 5000, GROUP_POSITIONS)),
        (0, 100, 3172),
        (0, 3172, 5000),
    ]
    assert sum(len(piece.checksums) for piece in found) == 10


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([checksum(0, 0, 10)], "buffer 1: digests up to 0"),
        ([checksum(0, 0, 9), checksum(1, 0, 10)], "buffer 0: digests up to 9"),
        ([checksum(0, 1, 10), checksum(1, 0, 10)], "expected one from 0"),
        ([checksum(0, 0, 6), checksum(0, 5, 10), checksum(1, 0, 10)], "expected one from 6"),
        ([checksum(0, 0, 10), checksum(1, 0, 10), checksum(2, 0, 10)], "buffer 2 of 2"),
        ([checksum(0, 0, 11), checksum(1, 0, 10)], "more than 100"),
    ],
)
def test_digests_that_do_not_cover_what_is_read_are_refused(rows: list[Checksum], what: str) -> None:
    with pytest.raises(WrongGrant, match=what):
        list(pieces(Checksums.of(rows), 0, 10, (10, 5), 100, order=(0, 1)))


def test_digests_cover_every_position_of_every_buffer_once() -> None:
    node = Fetching()
    slots = np.arange(5, 1005)
    found = list(digests(node.slots.destination.buffers, slots, 7))
    assert [(c.buffer, c.start, c.stop) for c in found] == [(b, 7, 1007) for b in range(3)]
    node.slots.layers[1][1004] = UNTOUCHED - 3
    changed = list(digests(node.slots.destination.buffers, slots, 7))
    assert [a == b for a, b in zip(found, changed, strict=True)] == [True, False, True]
