"""What is sent again, and how often."""

import math
from itertools import pairwise

import pytest

from control import repeats
from control.messages import Leaving, Peer
from control.repeats import SLOWEST_S, Repeats

PEER = Peer(role="prefill", address="127.0.0.1:2", boot_id="peer")


class Clock:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(repeats.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def sendings(table: Repeats, clock: Clock, seconds: float) -> list[float]:
    """When something was sent within so many seconds, from now."""
    sent = []
    until = clock.now + seconds
    while clock.now < until:
        sent += [clock.now for _ in table.take_due(clock.now)]
        clock.now = max(clock.now + 0.01, min(until, table.next_due))
    return sent


def test_a_peer_that_is_heard_is_told_at_the_pace_that_was_asked_for(clock: Clock) -> None:
    table = Repeats(lambda address: clock.now)
    table.add("key", PEER, Leaving(), every=0.5, give_up_after=math.inf)
    assert len(sendings(table, clock, 100.0)) == pytest.approx(200, abs=2)


def test_a_silent_peer_is_told_ever_less_often_and_never_given_up(clock: Clock) -> None:
    table = Repeats(lambda address: None)
    table.add("key", PEER, Leaving(), every=0.5, give_up_after=math.inf)
    assert len(sendings(table, clock, 3.0)) >= 4, "a message or two may have been lost"
    sent = sendings(table, clock, 100.0)
    pauses = [later - earlier for earlier, later in pairwise(sent)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(SLOWEST_S)


def test_when_it_is_heard_again_the_pace_is_the_old_one(clock: Clock) -> None:
    heard = [0.0]
    table = Repeats(lambda address: heard[0])
    table.add("key", PEER, Leaving(), every=0.5, give_up_after=math.inf)
    sendings(table, clock, 60.0)
    heard[0] = clock.now + 1000
    assert len(sendings(table, clock, 60.0)) > 100


def test_what_nobody_answers_in_time_is_given_up(clock: Clock) -> None:
    table = Repeats(lambda address: None)
    table.add("some", PEER, Leaving(), every=0.5, give_up_after=30.0)
    table.add("other", PEER, Leaving(), every=0.5, give_up_after=math.inf)
    assert table.take_given_up(clock.now + 29) == []
    assert [repeated.peer for repeated in table.take_given_up(clock.now + 31)] == [PEER]
    assert table.take_given_up(clock.now + 31) == []
    table.forget("other")
    assert table.next_due == math.inf
