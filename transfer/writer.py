"""Writes batches to a decode node and knows when they ended, whatever carries them.

The rule that fencing rests on is kept here, once for every transport: when `write` returns or raises, nothing of what
it posted is in flight.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from transfer.messages import Transport
from transfer.planner import Descriptors

BATCHES_IN_FLIGHT = 8
"""Enough to keep a transport busy; few enough that a ring of 1 MiB buffers stays in the processor's cache."""


class TransferError(Exception):
    """Some of a write failed. None of it is in flight any more."""


class TransferAborted(Exception):
    """A write was given up on request. None of it is in flight any more."""


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


def write(channel: Channel, batches: Iterable[Descriptors], go_on: Callable[[], bool] = lambda: True) -> None:
    """Post all batches, in order, and return when the last has landed.

    The next batch is asked for only when fewer than BATCHES_IN_FLIGHT are in flight, so an iterator that fills
    buffers may use that many in turn. Stops posting when one has failed, when `go_on` turns false, and when the
    iterator raises. Raises TransferError, TransferAborted, or what the iterator raised.
    """
    posted: deque[Pending] = deque()
    failed = 0
    aborted = False
    try:
        for batch in _cut(batches, channel.max_batch):
            if aborted := not go_on():
                break
            posted.append(channel.submit(batch))
            while len(posted) >= BATCHES_IN_FLIGHT:
                failed += posted.popleft().wait()
            if failed:
                break
    finally:
        failed += sum(pending.wait() for pending in posted)
    if failed:
        raise TransferError(f"{failed} descriptors failed")
    if aborted:
        raise TransferAborted("given up")
    channel.check()


def _cut(batches: Iterable[Descriptors], most: int) -> Iterator[Descriptors]:
    """The batches in pieces of at most so many descriptors."""
    for batch in batches:
        for first in range(0, len(batch.lengths), most):
            yield Descriptors(*(column[first : first + most] for column in batch))
