"""What is sent again, and how often."""

import math
from itertools import pairwise

import pytest

from control import repeats
from control.messages import Leaving, Peer, Pong
from control.repeats import SLOWEST_S, Repeats
from tests.work import calls_of

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
    over = clock.now + 30.0
    while clock.now < over:
        assert all(repeated.until > clock.now for repeated in table.take_due(clock.now))
        clock.now = table.next_due
    assert clock.now == over, "it is given up when its time is over"
    assert [repeated.until for repeated in table.take_due(clock.now)] == [over]
    clock.now += 60.0
    assert [repeated.until for repeated in table.take_due(clock.now)] == [math.inf]
    table.forget("other")
    assert table.next_due == math.inf


def test_what_replaces_a_message_is_sent_and_the_message_is_not(clock: Clock) -> None:
    table = Repeats(lambda address: clock.now)
    table.add("key", PEER, Leaving(), every=0.5, give_up_after=math.inf)
    list(table.take_due(clock.now))
    table.add("key", PEER, Pong(nonce=1), every=0.5, give_up_after=math.inf)
    assert [repeated.message for repeated in table.take_due(clock.now)] == [Pong(nonce=1)]
    assert len(sendings(table, clock, 10.0)) == pytest.approx(20, abs=2), "nor twice as often"


def test_a_turn_takes_no_longer_if_many_messages_wait_for_an_answer(clock: Clock) -> None:
    def turn() -> None:
        assert table.next_due > clock.now
        assert not list(table.take_due(clock.now))

    work = []
    for number in (10, 1000):
        table = Repeats(lambda address: clock.now)
        for key in range(number):
            table.add(key, PEER, Leaving(), every=0.5, give_up_after=math.inf)
        assert len(list(table.take_due(clock.now))) == number
        work.append(calls_of(turn))
    assert work[0] == work[1]
