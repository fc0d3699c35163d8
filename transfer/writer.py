"""Batches on their way to a decode node, whatever carries them.

The rule that fencing rests on is kept here, once for every transport: a write has ended when nothing of it is in
flight any more, and not before, whether it went well or not.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from transfer.messages import Transport
from transfer.planner import Descriptors

BATCHES_IN_FLIGHT = 6
"""Enough to keep a transport busy; few enough that a ring of send buffers stays in the processor's cache."""


class TransferError(Exception):
    """Some of a write failed."""


class Pending(Protocol):
    """A batch that was posted."""

    def wait(self) -> int:
        """How many of its descriptors failed, once every one of them has ended."""
        ...


class Channel(Protocol):
    """The way to one decode node. Used by one thread."""

    transport: Transport
    max_batch: int
    """Descriptors that one batch may have: times BATCHES_IN_FLIGHT, what the transport takes with ease."""

    def submit(self, batch: Descriptors) -> Pending:
        """Post a batch. Never raises: what cannot be posted counts as failed."""
        ...

    def check(self) -> None:
        """Raise TransferError if what was written may have gone to a process that is no more."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Write:
    """Batches that belong together. `on_end` is called once, when it is closed and nothing of it is in flight."""

    on_end: Callable[[], None]
    failed: int = 0
    """Descriptors that failed so far."""
    in_flight: int = 0
    closed: bool = False

    def end_if_over(self) -> None:
        if self.closed and not self.in_flight:
            self.on_end()


class Pipeline:
    """The batches in flight over one channel, oldest first, of one write after another.

    A write need not have ended before the next one is posted, so the transport never runs dry between two. One thread
    uses it; all callbacks are called there.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._posted: deque[tuple[Pending, Write]] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._posted

    def make_room(self) -> None:
        """Wait until fewer than BATCHES_IN_FLIGHT are in flight.

        Whoever fills buffers in turn calls it before filling the next one: the one that comes after so many is free.
        """
        while len(self._posted) >= BATCHES_IN_FLIGHT:
            self.settle_oldest()

    def post(self, write: Write, batch: Descriptors, go_on: Callable[[], bool]) -> bool:
        """Post a batch, in pieces that the channel takes, as long as `go_on` says so and nothing of the write failed.

        Whether all of it was posted.
        """
        for piece in batch.split(self.channel.max_batch):
            self.make_room()
            if write.failed or not go_on():
                return False
            self._posted.append((self.channel.submit(piece), write))
            write.in_flight += 1
        return True

    def close(self, write: Write) -> None:
        """Nothing more will be posted of the write: it ends when the last of it does."""
        write.closed = True
        write.end_if_over()

    def settle_oldest(self) -> None:
        """Wait for the oldest batch to end."""
        pending, write = self._posted.popleft()
        write.failed += pending.wait()
        write.in_flight -= 1
        write.end_if_over()

    def drain(self) -> None:
        """Wait for everything that was posted to end."""
        while self._posted:
            self.settle_oldest()
