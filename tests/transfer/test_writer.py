"""A write has ended when nothing of it is in flight any more: fencing rests on it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from tests.transfer.world import write
from transfer.choices import Transport
from transfer.planner import Descriptors
from transfer.writer import BATCHES_IN_FLIGHT, Outcome, Pending, Pipeline, TransferError, Write


@dataclass
class RecordingChannel:
    """Notes what is in flight; batches land unless `outcomes` has something else for their number."""

    transport: Transport = "rdma"
    max_batch: int = 4
    max_bytes: int = 1 << 20
    attempts: int = 5
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    most_in_flight: int = 0
    dead: bool = False
    breaks_when_posted: set[int] = field(default_factory=set)
    breaks_when_awaited: set[int] = field(default_factory=set)

    def submit(self, batch: Descriptors) -> Pending:
        self.lengths.append(len(batch.lengths))
        if len(self.lengths) - 1 in self.breaks_when_posted:
            raise RuntimeError("a bug")
        self.in_flight.append(len(self.lengths) - 1)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return partial(self._end, len(self.lengths) - 1)

    def _end(self, number: int) -> Outcome:
        self.in_flight.remove(number)
        if number in self.breaks_when_awaited:
            raise RuntimeError("a bug")
        return self.outcomes.get(number, Outcome.LANDED)

    def check(self) -> None:
        if self.dead:
            raise TransferError("the process has ended")

    def close(self) -> None: ...


def batch(length: int) -> Descriptors:
    return Descriptors(*(np.arange(length, dtype=np.int64) for _ in range(3)))


def a_write(on_end: Callable[[], None] = lambda: None, go_on: Callable[[], bool] = lambda: True) -> Write:
    return Write(on_end, go_on)


def test_large_batches_are_cut_to_what_the_transport_takes() -> None:
    channel = RecordingChannel()
    assert write(channel, [batch(10), batch(3), batch(4)])
    assert channel.lengths == [4, 4, 2, 3, 4]
    assert not channel.in_flight


def test_no_more_than_a_bounded_number_is_in_flight() -> None:
    channel = RecordingChannel()
    write(channel, [batch(1)] * 50)
    assert channel.most_in_flight == BATCHES_IN_FLIGHT
    assert len(channel.lengths) == 50


def test_a_buffer_is_held_until_all_that_was_posted_from_it_has_ended() -> None:
    channel = RecordingChannel()
    pipeline = Pipeline(channel)
    buffer = object()
    write = a_write()
    pipeline.post(write, batch(10), buffer)
    assert len(channel.in_flight) == 3
    for _ in range(3):
        assert buffer in pipeline.held
        pipeline.settle_oldest()
    assert buffer not in pipeline.held


def test_after_an_error_no_more_is_posted_and_the_rest_is_awaited() -> None:
    """A batch with one bad descriptor failed at once, and its other descriptors landed over the next second."""
    channel = RecordingChannel(outcomes={2: Outcome.FAILED})
    with pytest.raises(TransferError, match="FAILED"):
        write(channel, [batch(1)] * 50)
    assert len(channel.lengths) <= 2 + BATCHES_IN_FLIGHT + 1
    assert not channel.in_flight


@pytest.mark.parametrize("batches", [[batch(1)] * 50, [batch(400)]], ids=["between batches", "within a large one"])
def test_an_abort_awaits_what_is_posted(batches: list[Descriptors]) -> None:
    channel = RecordingChannel()
    assert not write(channel, batches, go_on=lambda: len(channel.lengths) < 5)
    assert len(channel.lengths) == 5
    assert not channel.in_flight


def test_a_write_ends_when_its_last_batch_does() -> None:
    channel = RecordingChannel(outcomes={5: Outcome.FAILED})
    pipeline = Pipeline(channel)
    ended: list[tuple[str, list[int]]] = []
    first = a_write(on_end=lambda: ended.append(("first", list(channel.in_flight))))
    second = a_write(on_end=lambda: ended.append(("second", list(channel.in_flight))))
    for write_, count in ((first, 2), (second, 4)):
        for _ in range(count):
            pipeline.post(write_, batch(1))
        pipeline.close(write_)
    pipeline.settle_oldest()
    assert not ended
    pipeline.settle_oldest()
    assert ended == [("first", [2, 3, 4, 5])]
    pipeline.drain()
    assert ended[1:] == [("second", [])]
    assert (first.outcome, second.outcome) == (Outcome.LANDED, Outcome.FAILED), "one write's failure is not another's"


def test_a_write_of_nothing_ends_at_once() -> None:
    ended: list[bool] = []
    Pipeline(RecordingChannel()).close(a_write(on_end=lambda: ended.append(True)))
    assert ended == [True]


def test_a_write_to_a_process_that_ended_meanwhile_is_an_error() -> None:
    with pytest.raises(TransferError, match="has ended"):
        write(RecordingChannel(dead=True), [batch(1)])


def test_what_was_cut_off_lingers_and_what_was_on_its_way_with_it_does_not() -> None:
    """The first copy stays where it was. It arrived when its slots had been given to somebody else."""
    channel = RecordingChannel(outcomes={1: Outcome.CUT})
    pipeline, cut, other = Pipeline(channel), a_write(), a_write()
    for write_ in (other, cut):
        pipeline.post(write_, batch(1))
    pipeline.drain()
    assert (cut.outcome, cut.lingers) == (Outcome.LANDED, True)
    assert (other.outcome, other.lingers) == (Outcome.LANDED, False)


@pytest.mark.parametrize(
    ("outcomes", "is_wanted", "outcome", "lingers", "num_posted"),
    [
        ([Outcome.LANDED], [True] * 9, Outcome.LANDED, False, 1),
        ([Outcome.FAILED], [True] * 9, Outcome.FAILED, False, 1),
        ([Outcome.GIVEN_UP], [True] * 9, Outcome.GIVEN_UP, True, 1),
        ([Outcome.CUT, Outcome.CUT], [True] * 9, Outcome.LANDED, True, 3),
        ([Outcome.CUT] * 100, [True] * 9, Outcome.CUT, True, 5),
        ([Outcome.CUT], [True, False], Outcome.CUT, True, 1),
        ([Outcome.CUT], [True], Outcome.CUT, True, 1),
    ],
)
def test_what_was_cut_is_posted_again_while_wanted_and_may_linger(
    outcomes: list[Outcome], is_wanted: list[bool], outcome: Outcome, lingers: bool, num_posted: int
) -> None:
    """A fence of a decode node behind one sender closes the connections of all. The first copy may arrive later.

    is_wanted: the answers; where they end, nobody knows.
    """
    answers = iter(is_wanted)
    channel = RecordingChannel(outcomes=dict(enumerate(outcomes)))
    pipeline, write_ = Pipeline(channel), a_write(go_on=lambda: next(answers))
    pipeline.post(write_, batch(1))
    pipeline.drain()
    assert (write_.outcome, write_.lingers) == (outcome, lingers)
    assert channel.lengths == [1] * num_posted


def test_what_was_given_up_is_not_posted_again() -> None:
    channel = RecordingChannel(outcomes={1: Outcome.GIVEN_UP, 2: Outcome.FAILED})
    pipeline, given_up = Pipeline(channel), a_write()
    for _ in range(3):
        pipeline.post(given_up, batch(1))
    pipeline.drain()
    assert (given_up.outcome, given_up.lingers) == (Outcome.GIVEN_UP, True)
    assert len(channel.lengths) == 3


@pytest.mark.parametrize("broken", ["posting", "waiting", "posting again", "waiting again"])
def test_a_batch_of_unknown_end_is_in_flight_for_ever(broken: str) -> None:
    channel = RecordingChannel()
    match broken:
        case "posting":
            channel.breaks_when_posted = {0}
        case "waiting":
            channel.breaks_when_awaited = {0}
        case "posting again":
            channel.outcomes, channel.breaks_when_posted = {0: Outcome.CUT}, {2}
        case "waiting again":
            channel.outcomes, channel.breaks_when_awaited = {0: Outcome.CUT}, {2}
    pipeline = Pipeline(channel)
    ended: list[str] = []
    lost, other = a_write(lambda: ended.append("lost")), a_write(lambda: ended.append("other"))
    buffers = object(), object()
    for write_, buffer in zip((lost, other), buffers, strict=True):
        pipeline.post(write_, batch(1), buffer)
        pipeline.close(write_)
    assert not pipeline.lost_track
    pipeline.drain()
    assert ended == ["lost", "other"]
    assert (lost.outcome, other.outcome) == (Outcome.UNKNOWN, Outcome.LANDED)
    assert pipeline.held == {buffers[0]}, "it may be read yet"
    assert pipeline.lost_track
