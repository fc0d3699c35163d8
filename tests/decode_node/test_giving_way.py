"""Who gives way when slots run out, and how it comes back."""

import time

import pytest

from control.messages import PrefillFailed, Sampling
from decode_node.request import RequestState
from tests.decode_node.world import GATEWAY, HOT, PREFILL, World, counted
from transfer.fencing import DRAIN_GRACE_S, LANDED_CAN_WAIT_S


def test_of_two_priorities_the_higher_gives_its_device_slots_up() -> None:
    h = World(device_slots=HOT + 1 + 2)
    for name, priority in (("later", 1), ("sooner", 0)):
        h.ask(name, prompt=(10,), tokens=30, priority=priority)
    h.run()
    assert h.answers["later"] == h.answers["sooner"] == counted((10,), 30)
    assert list(h.ended) == ["sooner", "later"]
    assert h.metrics.retractions.labels("device")._value.get() > 0


def test_what_changes_logits_is_the_same_after_a_retraction() -> None:
    """Nine device slots: two requests with one slot each are admitted, and each grows to five."""

    def answers(device_slots: int) -> dict[str, list[int]]:
        h = World(device_slots=device_slots)
        for seed, name in enumerate("abcd"):
            changes = Sampling(seed=seed, temperature=8, frequency_penalty=1.5, repetition_penalty=1.4, min_p=0.01)
            h.ask(name, prompt=(10, 11), tokens=30, sampling=changes)
        h.run()
        assert bool(h.metrics.retractions.labels("device")._value.get()) == (device_slots < 100)
        return h.answers

    assert answers(HOT + 1 + 2) == answers(400)


def test_when_host_slots_run_out_the_youngest_is_prefilled_again() -> None:
    h = World(host_slots=130)
    for name in "abc":
        h.ask(name, prompt=tuple(range(1, 21)), tokens=100)
    while "a" in h.scheduler.requests:
        h.turn()
        if "a" in h.scheduler.requests and h.answers.get("a"):
            assert h.state("a") in (RequestState.RUNNING, RequestState.LANDED), "the oldest never gives way"
    h.run()
    assert next(iter(h.ended)) == "a"
    assert h.answers == {name: list(range(21, 121)) for name in "abc"}
    assert h.metrics.retractions.labels("host")._value.get() > 0


def test_a_younger_prefill_gives_way_to_an_older_request() -> None:
    """1,000 slots: A runs with 564, B's prompt of 370 is on its way, and A's growth finds nothing left."""
    h = World(slow={"b"}, quiet=False)
    prompt_a, prompt_b = (1,) * 565, (2,) * 371
    h.ask("a", prompt=prompt_a, tokens=300)
    h.ask("b", prompt=prompt_b, tokens=5)
    for _ in range(200):
        h.turn()
    assert h.state("b") is RequestState.WAITING, "its attempt was given up"
    assert h.remote.quarantine.num_slots == 370
    assert h.state("a") is RequestState.RUNNING
    assert h.scheduler.requests["a"].epoch == 1, "it was never prefilled again"
    got = len(h.answers["a"])
    assert got > 60
    for _ in range(50):
        h.turn()
    assert len(h.answers["a"]) == got, "it sits out until slots come back, however long that takes"
    assert not h.scheduler.has_work, "the loop waits for a message meanwhile"
    h.quiet = True
    h.slow.clear()
    h.run()
    assert h.answers == {"a": counted(prompt_a, 300), "b": counted(prompt_b, 5)}
    assert h.metrics.retractions.labels("host")._value.get() >= 1


def test_a_prefill_that_gave_way_was_no_failed_one() -> None:
    h = World(slow={"b"}, retries=1)
    h.ask("a", prompt=(1,) * 565, tokens=300)
    h.ask("b", prompt=(2,) * 371, tokens=5)
    request = h.scheduler.requests["b"]
    while not request.retractions:
        h.turn()
    while request.state is not RequestState.PREFILLING:
        h.turn()
    h.remote.take(PREFILL, PrefillFailed(attempt=request.attempt("decode"), reason="out of memory"))
    assert request.state is RequestState.WAITING, "the first of two attempts has failed"
    request.again_at = 0.0
    h.slow.clear()
    h.run()
    assert h.answers["b"] == counted((2,), 5)


@pytest.mark.parametrize("lingering", [False, True])
def test_requests_that_grow_at_the_same_time_lose_no_more_than_they_need(lingering: bool) -> None:
    """Three equal ones fill the pool and lack 64 slots each: one gives 128 up, which are enough for the others. If
    writes to 64 of them may linger, one of the others waits for these."""
    h = World(host_slots=384, lingering=lingering)
    for name in "abc":
        h.ask(name, prompt=(1,) * 65, tokens=100)
    while not h.metrics.retractions.labels("host")._value.get():
        h.turn()
    assert [h.state(name) for name in "ab"] == [RequestState.RUNNING] * 2
    for _ in range(5):
        h.turn()
    assert h.metrics.retractions.labels("host")._value.get() == 1
    h.lingering = False
    h.remote.tick(time.monotonic() + DRAIN_GRACE_S + LANDED_CAN_WAIT_S)
    h.run()
    assert h.answers == {name: counted((1,), 100) for name in "abc"}


@pytest.mark.parametrize("patient", [True, False])
def test_no_more_prefills_give_way_than_needed(monkeypatch: pytest.MonkeyPatch, patient: bool) -> None:
    """Their slots are in quarantine, and usually free at once. If they are not for long, the next gives way."""
    if not patient:
        monkeypatch.setattr("decode_node.slots._FRESH_S", 0.0)
    h = World(host_slots=400, slow={"b", "c"}, quiet=False)
    h.ask("a", prompt=(1,) * 129, tokens=100)
    for name in "bc":
        h.ask(name, prompt=(2,) * 101, tokens=5)
    for _ in range(120):
        h.turn()
    assert h.state("a") is RequestState.RUNNING
    assert h.state("b") is (RequestState.PREFILLING if patient else RequestState.WAITING)
    assert h.state("c") is RequestState.WAITING
    h.quiet = True
    h.slow.clear()
    h.run()
    assert h.answers == {"a": counted((1,), 100), "b": counted((2,), 5), "c": counted((2,), 5)}


def test_others_go_on_while_one_waits_for_host_slots() -> None:
    """318 slots: 61 of an aborted prefill are in quarantine, and two requests grow by 64 each."""
    h = World(host_slots=318, slow={"aborted"}, quiet=False)
    h.ask("first", prompt=(1,) * 101, tokens=120)
    h.ask("aborted", prompt=(3,) * 62)
    h.turn()
    h.scheduler.cancel("aborted", GATEWAY)
    while len(h.answers.get("first", ())) < 40:
        h.turn()
    h.ask("second", prompt=(2,) * 30, tokens=60)
    while "second" in h.scheduler.requests:
        h.turn()
        if "second" in h.answers:
            assert h.state("first") is RequestState.RUNNING
    assert h.answers["second"] == counted((2,), 60)
    assert len(h.answers["first"]) == 64, "it waited for the slots in quarantine, and took nobody's"
    h.quiet = True
    h.run()
    assert h.answers["first"] == counted((1,), 120)
