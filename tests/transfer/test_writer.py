"""A write has ended when nothing of it is in flight any more: fencing rests on it."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.transfer.writing import write
from transfer.messages import Transport
from transfer.planner import Descriptors
from transfer.writer import BATCHES_IN_FLIGHT, Pipeline, TransferError, Write


@dataclass
class Recorded:
    channel: "RecordingChannel"
    number: int

    def wait(self) -> int:
        self.channel.in_flight.remove(self.number)
        return int(self.number in self.channel.failing)


@dataclass
class RecordingChannel:
    """Notes what is in flight; batches whose number is in `failing` fail."""

    transport: Transport = "rdma"
    max_batch: int = 4
    failing: set[int] = field(default_factory=set)
    lengths: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    most_in_flight: int = 0
    dead: bool = False

    def submit(self, batch: Descriptors) -> Recorded:
        self.lengths.append(len(batch.lengths))
        self.in_flight.append(len(self.lengths) - 1)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return Recorded(self, len(self.lengths) - 1)

    def check(self) -> None:
        if self.dead:
            raise TransferError("the process has ended")

    def close(self) -> None: ...


def batch(length: int) -> Descriptors:
    return Descriptors(*(np.arange(length, dtype=np.int64) for _ in range(3)))


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


def test_after_making_room_a_buffer_that_comes_after_so_many_is_free() -> None:
    channel = RecordingChannel()
    pipeline = Pipeline(channel)
    first, second = Write(on_end=lambda: None), Write(on_end=lambda: None)
    for number in range(50):
        pipeline.make_room()
        assert number - BATCHES_IN_FLIGHT not in channel.in_flight
        pipeline.post(first if number < 20 else second, batch(1), lambda: True)


def test_after_an_error_no_more_of_that_write_is_posted_and_the_rest_is_awaited() -> None:
    """A batch with one bad descriptor failed at once, and its other descriptors landed over the next second."""
    channel = RecordingChannel(failing={2})
    with pytest.raises(TransferError, match="1 descriptors failed"):
        write(channel, [batch(1)] * 50)
    assert len(channel.lengths) <= 2 + BATCHES_IN_FLIGHT + 1
    assert not channel.in_flight


def test_an_abort_awaits_what_is_posted() -> None:
    channel = RecordingChannel()
    assert not write(channel, [batch(1)] * 50, go_on=lambda: len(channel.lengths) < 5)
    assert len(channel.lengths) == 5
    assert not channel.in_flight


def test_an_abort_is_heard_within_a_large_batch() -> None:
    channel = RecordingChannel()
    assert not write(channel, [batch(400)], go_on=lambda: len(channel.lengths) < 5)
    assert len(channel.lengths) == 5


def test_a_write_ends_when_its_last_batch_does_while_the_next_is_on_its_way() -> None:
    channel = RecordingChannel(failing={5})
    pipeline = Pipeline(channel)
    ended: list[tuple[str, list[int]]] = []
    first = Write(on_end=lambda: ended.append(("first", list(channel.in_flight))))
    second = Write(on_end=lambda: ended.append(("second", list(channel.in_flight))))
    for write_, count in ((first, 2), (second, 4)):
        for _ in range(count):
            pipeline.post(write_, batch(1), lambda: True)
        pipeline.close(write_)
    pipeline.settle_oldest()
    assert not ended
    pipeline.settle_oldest()
    assert ended == [("first", [2, 3, 4, 5])]
    pipeline.drain()
    assert ended[1:] == [("second", [])]
    assert (first.failed, second.failed) == (0, 1), "one write's failure is not another's"


def test_a_write_of_nothing_ends_at_once() -> None:
    ended: list[bool] = []
    Pipeline(RecordingChannel()).close(Write(on_end=lambda: ended.append(True)))
    assert ended == [True]


def test_a_write_to_a_process_that_ended_meanwhile_is_an_error() -> None:
    with pytest.raises(TransferError, match="has ended"):
        write(RecordingChannel(dead=True), [batch(1)])
