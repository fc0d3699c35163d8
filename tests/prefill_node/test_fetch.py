"""A prefill node reads prefixes back from decode nodes: what matches its digests is used, and all else is computed."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from control.messages import Abort, FetchDone, FetchGrant, FetchRefused, FetchRequest, Message, PrefillFailed, Quiesced
from prefill_node.prefixes import LEAST_TOKENS
from tests.prefill_node.fetching import FIRST, PREFIX, SENT_TO, Fetching, GroupFetching, Held
from tests.prefill_node.sending import LateChannel
from tests.prefill_node.world import DECODE, TOKEN_BYTES, LiveWorld, R, World, live, new_cache, request
from transfer.memory import Checksums
from transfer.transports import NoRoute
from transfer.writer import Outcome


@pytest.fixture
def node() -> Iterator[Fetching]:
    yield from live(Fetching())


def test_what_was_fetched_is_not_computed_and_is_cached_as_if_it_were(node: Fetching) -> None:
    attempt, asked = node.ask_fetching()
    assert (asked.start, asked.stop) == (0, PREFIX)
    assert node.metric("requests", state="fetching") == 1
    node.answer(asked)
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
    node.answer(asked)
    node.done(attempt)
    assert node.model.tokens == 64 + 72
    short = node.ask([*FIRST[:128], *FIRST[:20]], LEAST_TOKENS - 1 + 128 - 64, SENT_TO)
    node.done(short)
    assert not node.told(FetchRequest, short)


def test_jobs_that_lack_the_same_prefix_fetch_it_once(node: Fetching) -> None:
    first, asked = node.ask_fetching()
    aborted, second = (node.ask([*FIRST[:150], 7, extra], PREFIX, ((800, 24),)) for extra in (1, 2))
    node.tell()
    assert node.metric("requests", state="fetching") == 3
    node.stop(aborted)
    node.answer(asked)
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
    node.answer(again)
    node.done(second)
    assert node.metric("prefix_fetched_tokens_total") == PREFIX


def refuse(node: Fetching, asked: FetchRequest) -> None:
    node.planner.fetch_answered(FetchRefused(attempt=asked.attempt, reason="it is not here any more"))


def other_bytes(node: Fetching, asked: FetchRequest) -> None:
    """A decode process that was replaced, say."""
    grant = node.grant(asked)
    node.slots.layers[2][grant.extents[-1][0]] += 1
    node.planner.fetch_answered(grant)


def changed(**changes: Any) -> Callable[[Fetching, FetchRequest], None]:
    return lambda node, asked: node.answer(asked, **changes)


def a_failed_read(node: Fetching, asked: FetchRequest) -> None:
    """Half way."""
    node.all[-1].reads.outcomes = [Outcome.LANDED, Outcome.FAILED]
    node.answer(asked)


def no_route(node: Fetching, asked: FetchRequest) -> None:
    def connect() -> LateChannel:
        raise NoRoute("another host")

    node.all[-1].connect_reads = connect
    node.answer(asked)


def a_bug(node: Fetching, asked: FetchRequest) -> None:
    node.reads.max_bytes = None  # type: ignore[assignment]
    node.answer(asked)


def silence(node: Fetching, asked: FetchRequest) -> None:
    node.be_late()
    node.answer(asked)


def a_slow_rank(node: Fetching, asked: FetchRequest) -> None:
    slow = node.all[-1]
    slow.reads.hold = threading.Event()
    node.answer(asked)
    node.until_missing(asked.attempt, slow.rank)
    node.be_late()
    slow.reads.hold.set()


def no_lease(node: Fetching, asked: FetchRequest) -> None:
    node.first.silence = 2.5
    node.answer(asked)
    time.sleep(0.1)
    assert node.reads.posted == [], "its address may be another process's"
    node.be_late()
    node.first.silence = 0.0


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("what", "failure"),
    [
        (refuse, "refused"),
        (changed(start=1), "refused"),
        (changed(extents=((0, 3),)), "refused"),
        (changed(extents=((2000, 128),)), "refused"),
        (other_bytes, "checksum"),
        (changed(checksums=Checksums()), "checksum"),
        (a_failed_read, "read"),
        (no_route, "read"),
        (a_bug, "read"),
        (silence, "timeout"),
        (a_slow_rank, "timeout"),
        (no_lease, "timeout"),
    ],
)
def test_what_is_not_brought_is_computed(
    num_ranks: int, what: Callable[[Fetching, FetchRequest], None], failure: str
) -> None:
    node = Fetching() if num_ranks == 1 else GroupFetching()
    attempt, asked = node.ask_fetching()
    what(node, asked)
    node.until(FetchDone, attempt)
    node.lend()
    node.finish(attempt, computed=200)
    assert node.failures(failure) == 1
    assert node.metric("prefix_fetched_tokens_total") == 0
    assert node.exchange.gathers == 0
    node.close()


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


def test_it_fetches_where_that_is_estimated_to_be_faster() -> None:
    node = Fetching("auto")
    fetches = node.fetches
    attempt = node.ask_and_grant()
    node.finish(attempt, computed=72)

    def prefill(computed: int) -> None:
        """Without a fetch."""
        node.prefixes.clear()
        before, tokens = len(node.updates), node.model.tokens
        node.done(attempt := node.ask(FIRST[:200], PREFIX, SENT_TO))
        assert not [update for update in node.updates[before:] if isinstance(update, FetchRequest)]
        assert node.model.tokens - tokens == computed
        node.release(attempt)

    for _ in range(5):
        fetches.fetch_costs.observe("decode", "tcp", PREFIX * TOKEN_BYTES, 10.0)
    prefill(200)
    fetches.fetch_costs._models["decode"]._seen_at -= 7200
    for _ in range(40):
        fetches.compute_cost.observe([(0, 32)], 1.0)
    node.prefixes.clear()
    attempt, asked = node.ask_fetching()
    refuse(node, asked)
    node.done(attempt)
    node.release(attempt)
    prefill(200)
    node.close()


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


@pytest.mark.parametrize(
    "answer",
    [
        FetchGrant(attempt=R, start=0, stop=64, extents=((0, 64),), checksums=Checksums()),
        FetchRefused(attempt=R, reason="it is not here"),
        Abort(attempt=R),
        FetchDone(attempt=R),
    ],
)
def test_a_node_asks_for_a_prefix_until_it_is_answered_or_does_not_want_it(answer: Message) -> None:
    h = World()
    answers: list[Message] = []
    h.planner.fetch_answered = answers.append  # type: ignore[assignment,method-assign]
    h.receive(request())
    asked = FetchRequest(attempt=R, start=0, stop=64)
    h.planner._updates.append(asked)
    h.tell()
    assert h.control.repeated["fetch", R] == (DECODE, asked)
    if isinstance(answer, FetchDone):
        h.planner._updates.append(answer)
        h.tell()
        assert h.control.take(FetchDone) == [answer]
    else:
        h.receive(answer, sender=DECODE.model_copy(update={"boot_id": "another"}))
        assert ("fetch", R) in h.control.repeated
        h.receive(answer)
    assert ("fetch", R) not in h.control.repeated
    assert answers == ([answer] if isinstance(answer, FetchGrant | FetchRefused) else [])
