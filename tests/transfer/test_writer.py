"""When `write` returns or raises, nothing of what it posted is in flight: fencing rests on it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from transfer.messages import Transport
from transfer.planner import Descriptors
from transfer.writer import BATCHES_IN_FLIGHT, TransferAborted, TransferError, write


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
    write(channel, [batch(10), batch(3), batch(4)])
    assert channel.lengths == [4, 4, 2, 3, 4]
    assert not channel.in_flight


def test_the_next_batch_is_asked_for_when_few_enough_are_in_flight() -> None:
    """An iterator that fills BATCHES_IN_FLIGHT buffers in turn never fills one that is being read."""
    channel = RecordingChannel()

    def batches() -> Iterator[Descriptors]:
        for _ in range(50):
            assert len(channel.in_flight) < BATCHES_IN_FLIGHT
            yield batch(1)

    write(channel, batches())
    assert channel.most_in_flight == BATCHES_IN_FLIGHT
    assert len(channel.lengths) == 50


def test_after_an_error_no_more_is_posted_and_the_rest_is_awaited() -> None:
    """A batch with one bad descriptor failed at once, and its other descriptors landed over the next second."""
    channel = RecordingChannel(failing={2})
    with pytest.raises(TransferError, match="1 descriptors failed"):
        write(channel, [batch(1)] * 50)
    assert len(channel.lengths) <= 2 + BATCHES_IN_FLIGHT + 1
    assert not channel.in_flight


def test_an_abort_awaits_what_is_posted() -> None:
    channel = RecordingChannel()
    with pytest.raises(TransferAborted):
        write(channel, [batch(1)] * 50, go_on=lambda: len(channel.lengths) < 5)
    assert len(channel.lengths) == 5
    assert not channel.in_flight


def test_an_iterator_that_raises_leaves_nothing_in_flight() -> None:
    channel = RecordingChannel()

    def batches() -> Iterator[Descriptors]:
        yield batch(1)
        raise TransferAborted("the forward pass failed")

    with pytest.raises(TransferAborted, match="forward pass"):
        write(channel, batches())
    assert not channel.in_flight


def test_a_write_to_a_process_that_ended_meanwhile_is_an_error() -> None:
    with pytest.raises(TransferError, match="has ended"):
        write(RecordingChannel(dead=True), [batch(1)])
