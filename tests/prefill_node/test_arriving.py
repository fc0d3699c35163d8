"""A forward pass begins while layers of its prefix are still being fetched, and counts only if all of them come."""

import threading
from collections.abc import Iterator

import pytest

from control.messages import AttemptId, FetchDone, Quiesced
from prefill_node import prefixes
from prefill_node.arrival import AllJobsVoid, AwaitedPrefixes, PrefixArrival, arrives_in_time
from prefill_node.costs import ComputeCost
from prefill_node.orders import LayersRead
from tests.prefill_node.fetching import FIRST, PREFIX, SENT_TO, Fetching
from tests.prefill_node.sending import LateChannel
from tests.prefill_node.world import TOKEN_BYTES
from transfer.planner import Descriptors
from transfer.writer import Outcome

LAYER_0, LAYER_1 = 2, 3
"""Batches that are the items and index keys of layer 0, and with the items of layer 1."""


class GatedReads(LateChannel):
    """The batches of layer 1 land when the gate is opened."""

    def __init__(self) -> None:
        super().__init__("tcp")
        self.gate = threading.Event()
        self.passing = LAYER_0

    def _land(self, batch: Descriptors) -> Outcome:
        if not self.passing:
            self.gate.wait(10)
        else:
            self.passing -= 1
        return super()._land(batch)


class Arriving(Fetching):
    """Its passes are thought to take long, so that a job joins one as soon as layer 0 of its prefix is there."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = self.first.reads = GatedReads()
        self.think_passes_take(100.0)

    def think_passes_take(self, seconds: float) -> None:
        self.fetches.compute_cost = ComputeCost(chunk_size=32)
        self.fetches.compute_cost.observe([(0, 32)], seconds)

    def ask_and_spoil(self, layer: int) -> AttemptId:
        attempt, asked = self.ask_fetching()
        grant = self.grant(asked)
        self.slots.layers[layer][grant.extents[-1][0]] += 1
        self.planner.fetch_answered(grant)
        return attempt

    def until_in_a_pass(self) -> None:
        self.turn_until(lambda: bool(self.model.computed))

    def until_layers_came(self, attempt: AttemptId) -> None:
        def layers_came() -> bool:
            fetch = self.held[attempt].fetch
            return fetch is not None and fetch.layers is not None

        self.turn_until(layers_came)

    def compute_another(self) -> None:
        self.done(other := self.ask_another())
        self.release(other)

    def check_sent_once(self, attempt: AttemptId) -> None:
        done = self.done(attempt)
        self.check_sent()
        assert done.transferred_bytes == (200 - PREFIX) * TOKEN_BYTES
        self.release(attempt)
        self.cache.check_idle()
        self.prefixes.check_integrity()
        again = self.ask(FIRST[:200], PREFIX, SENT_TO)
        assert self.done(again).cached_tokens == 192
        self.check_sent()


@pytest.fixture
def node() -> Iterator[Arriving]:
    node = Arriving()
    yield node
    node.gated.gate.set()
    node.close()


def test_a_pass_begins_with_the_first_layer_and_sends_after_the_last(node: Arriving) -> None:
    attempt = node.ask_and_grant()
    node.until_in_a_pass()
    assert node.model.computed == [[(128, 160)]]
    assert node.metric("requests", state="fetching") == 1
    assert node.channel.posted == []
    assert node.cache.find(node.held[attempt].token_ids.numpy()) == 0, "not all of it is verified"
    node.gated.gate.set()
    node.until(FetchDone, attempt)
    node.finish(attempt, computed=72)
    assert node.metric("prefix_fetched_tokens_total") == PREFIX
    assert node.metric("prompt_tokens_total") == 72


@pytest.mark.parametrize(("spoilt_layer", "failure"), [(1, "checksum"), (None, "read")])
def test_a_layer_that_does_not_come_makes_the_pass_void(node: Arriving, spoilt_layer: int | None, failure: str) -> None:
    if failure == "read":
        node.reads.outcomes = [*[Outcome.LANDED] * LAYER_0, Outcome.FAILED]
    attempt = node.ask_and_grant() if spoilt_layer is None else node.ask_and_spoil(spoilt_layer)
    node.until_in_a_pass()
    node.gated.gate.set()
    node.until(FetchDone, attempt)
    node.lend()
    node.compute_another()
    node.check_sent_once(attempt)
    assert node.failures(failure) == 1
    assert node.model.computed[0] == [(128, 160)]
    assert node.metric("prompt_tokens_total") == 200 + 40 + (200 - 192), "the void pass does not count"
    assert node.metric("prefix_fetched_tokens_total") == 0


def test_a_prefix_that_stalls_is_used_when_it_comes(node: Arriving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "pass_patience", lambda _: 0.05)
    attempt = node.ask_and_grant()
    node.until_in_a_pass()
    node.compute_another()
    assert node.metric("requests", state="fetching") == 1, "it goes on"
    node.gated.gate.set()
    node.until(FetchDone, attempt)
    node.check_sent_once(attempt)
    assert node.metric("prompt_tokens_total") == 72 + 40 + (200 - 192)
    assert node.metric("prefix_fetched_tokens_total") == PREFIX


def test_a_prompt_that_shares_a_void_pass_is_computed_there(node: Arriving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "pass_patience", lambda _: 0.05)
    node.prefill.chunk_size = 100
    _, asked = node.ask_fetching(length=150)
    node.model.before_pass = lambda: node.hold.wait(10)
    held_up = node.ask([8] * 20, 0, ((900, 20),))
    node.turn_until(lambda: node.planner.progress(()).current_pass is not None)
    node.answer(asked)
    other = node.ask_another()
    node.until_layers_came(asked.attempt)
    node.hold.set()
    node.done(held_up)
    node.done(other)
    assert node.model.computed == [[(0, 20)], [(128, 150), (0, 40)]]
    node.gated.gate.set()
    node.done(asked.attempt)
    node.check_sent(150)
    assert node.model.computed[2:] == [[(128, 150)]]


def test_a_slow_link_keeps_its_prompt_out_of_passes(node: Arriving, monkeypatch: pytest.MonkeyPatch) -> None:
    node.think_passes_take(1e-9)
    # What the other prompt really takes on a busy machine is long enough for the link.
    monkeypatch.setattr(node.fetches.compute_cost, "observe", lambda *_: None)
    attempt = node.ask_and_grant()
    node.until_layers_came(attempt)
    node.compute_another()
    assert node.model.tokens == 40
    node.gated.gate.set()
    node.until(FetchDone, attempt)
    node.check_sent_once(attempt)
    assert node.model.computed[2] == [(128, 160)]


def test_a_stopped_attempt_frees_the_pass_at_once_and_its_pages_later(node: Arriving) -> None:
    attempt = node.ask_and_grant()
    node.until_in_a_pass()
    node.stop(attempt)
    node.compute_another()
    assert node.metric("prefill_pages", state="used") > 0
    assert not node.told(Quiesced), "it is being read"
    node.gated.gate.set()
    node.turn_until(lambda: attempt not in node.held)
    node.until(Quiesced, attempt)
    assert not node.told(FetchDone)
    assert node.metric("prompt_tokens_total") == 40


def test_a_node_that_closes_waits_for_no_prefix() -> None:
    node = Arriving()
    node.ask_and_grant()
    node.until_in_a_pass()
    node.close()
    node.gated.gate.set()


def arrival() -> PrefixArrival:
    return PrefixArrival((0, 1, 2, 3, 0, 2))


def ended_in_time(coming: PrefixArrival) -> bool:
    found: list[bool] = []
    coming.end(found.append)
    return found == [True]


def test_what_was_given_up_stays_given_up() -> None:
    for late in (False, True):
        coming = arrival()
        coming.begin()
        coming.set_layers_ready(2)
        if late:
            assert not coming.wait(2, 0)
        else:
            coming.give_up()
        coming.set_layers_ready(4)
        assert not ended_in_time(coming)
        assert not coming.wait(0, 1000)


def test_no_layer_of_a_model_with_one_is_ready_before_the_end() -> None:
    reported: list[LayersRead] = []
    coming = PrefixArrival((0, 0), report=reported.append)
    coming.begin()
    coming.set_layers_ready(1)
    assert not reported, "how fast layers come cannot be told"
    assert ended_in_time(coming)


def test_a_prefix_is_in_time_if_all_is_expected_before_the_last_layer() -> None:
    one_of_four = LayersRead(work=1, layers=1, began_at=0.0, at=2.0)
    # Three more take 6 s; the last one is needed after three quarters of the pass.
    assert arrives_in_time(one_of_four, 4, 8.0, now=2.0)
    assert not arrives_in_time(one_of_four, 4, 7.9, now=2.0)
    assert not arrives_in_time(one_of_four, 4, 8.0, now=12.0), "the second one is late"


def test_a_pass_waits_no_longer_for_all_its_prefixes_than_it_may() -> None:
    first, second = arrival(), arrival()
    awaited = AwaitedPrefixes({0: first, 2: second}, num_chunks=3, patience=0.0)
    first.begin()
    first.set_layers_ready(2)
    awaited.wait(0)
    assert awaited.void == {2}
    awaited.wait(1)
    awaited.wait(2)
    assert awaited.void == {0, 2}
    alone = AwaitedPrefixes({0: first}, num_chunks=1, patience=0.0)
    with pytest.raises(AllJobsVoid):
        alone.wait(0)
