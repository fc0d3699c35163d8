"""Batches on their way to a decode node, whatever carries them.

The rules that fencing rests on are kept here, once for every transport: a write has ended when its transport knows of
nothing more of it, whether it went well or not; and how it ended says whether the network may know of more.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import structlog

from control.messages import Transport
from transfer.planner import Descriptors

log = structlog.get_logger(__name__)

BATCHES_IN_FLIGHT = 8
"""Enough to keep a transport busy; few enough that a ring of send buffers stays in the processor's cache."""


class TransferError(Exception):
    """Some of a write failed."""


class Outcome(IntEnum):
    """How what was posted ended, the best first; of several, the worst counts."""

    LANDED = 0
    FAILED = 1
    """Refused: nothing of it is on its way."""
    CUT = 2
    """Its connection was closed under it. Another one may carry it."""
    GIVEN_UP = 3
    """The transport heard nothing for too long and stopped waiting."""
    UNKNOWN = 4
    """Posting it or waiting for its end raised: it counts as in flight for as long as this process runs.

    Not as lingering: a fence at the receiver holds only what is on its way. Mooncake, over TCP or RDMA, may have
    descriptors queued that it sends over a connection which does not exist yet. So what a batch of unknown end reads
    stays in place, and the receiver's slots are free when this process is proved to have ended. Shared memory does not
    come to this: its copies are done by threads of this process, and when all of them have left a copy nothing of it is
    in flight, even if one of them raised: that is FAILED.
    """

    @property
    def lingers(self) -> bool:
        """Whether bytes of it may land later: the network, and the kernels of both sides, keep what they have taken."""
        return self >= Outcome.CUT


class Pending(Protocol):
    """A batch that was posted."""

    def wait(self) -> Outcome:
        """How it ended, once every one of its descriptors has. Whatever it raises means that nobody knows."""
        ...


class Channel(Protocol):
    """The way to one decode node. Used by one thread."""

    transport: Transport
    max_batch: int
    """Descriptors that one batch may have: times BATCHES_IN_FLIGHT, what the transport takes with ease."""
    max_bytes: int
    """Bytes that one descriptor may have."""
    attempts: int
    """How often a batch is posted that is cut off again and again."""

    def submit(self, batch: Descriptors) -> Pending:
        """Post a batch. What cannot be posted counts as failed. If this raises, nobody knows what was posted."""
        ...

    def check(self) -> None:
        """Raise TransferError if what was written may have gone to a process that is no more."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Write:
    """Batches that belong together. `on_end` is called once, when it is closed and all of it has ended or is UNKNOWN.

    `go_on` is asked before anything of it is posted: it may wait, and says whether the write is still wanted.
    """

    on_end: Callable[[], None]
    go_on: Callable[[], bool]
    outcome: Outcome = Outcome.LANDED
    """Of what has ended so far. What was cut and has landed when it was posted again counts as landed."""
    lingers: bool = False
    """Whether bytes of it may still land later, also if all of it has landed: a first copy that was cut stays where it
    was, in the network or in a kernel, and lands at the same place as the second, with the same bytes."""
    in_flight: int = 0
    closed: bool = False

    @property
    def may_post(self) -> bool:
        return self.outcome is Outcome.LANDED and self.go_on()

    def end_if_over(self) -> None:
        if self.closed and not self.in_flight:
            self.on_end()


@dataclass(eq=False)
class _Posted:
    batch: Descriptors
    pending: Pending
    write: Write
    buffer: object


class Pipeline:
    """The batches in flight over one channel, oldest first, of one write after another.

    A write need not have ended before the next one is posted, so the transport never runs dry between two. One thread
    uses it; all callbacks are called there. What a channel raises is the outcome of one batch (UNKNOWN) and goes no
    further.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._posted: deque[_Posted] = deque()
        self._unknown: list[_Posted] = []
        """Those whose end is unknown: what they were posted from is held for ever."""

    @property
    def is_empty(self) -> bool:
        return not self._posted

    @property
    def held(self) -> set[object]:
        """The buffers from which something that is in flight was posted, and None if something else is."""
        return {posted.buffer for posted in (*self._posted, *self._unknown)}

    @property
    def lost_track(self) -> bool:
        """Whether something may be in flight for as long as this process runs: its memory and its channel must stay."""
        return bool(self._unknown)

    def post(self, write: Write, batch: Descriptors, buffer: object = None) -> bool:
        """Post a batch, in pieces that the channel takes, as long as its write goes on and nothing of that failed.

        buffer: the send buffer that it is read from, if it is; held until the batch has ended.
        Whether all of it was posted.
        """
        for piece in batch.split(self.channel.max_batch):
            while len(self._posted) >= BATCHES_IN_FLIGHT:
                self.settle_oldest()
            if not write.may_post:
                return False
            self._posted.append(_Posted(piece, self._submitted(piece), write, buffer))
            write.in_flight += 1
        return True

    def close(self, write: Write) -> None:
        """Nothing more will be posted of the write: it ends when the last of it does."""
        write.closed = True
        write.end_if_over()

    def settle_oldest(self) -> None:
        """Wait for the oldest batch to end. What was cut off is posted again: the same bytes to the same place."""
        oldest = self._posted[0]
        write = oldest.write
        outcome = _awaited(oldest.pending)
        write.lingers |= outcome.lingers
        for _ in range(self.channel.attempts - 1):
            if outcome is not Outcome.CUT or not _may_repeat(write):
                break
            outcome = _awaited(self._submitted(oldest.batch))
            write.lingers |= outcome.lingers
        self._posted.popleft()
        if outcome is Outcome.UNKNOWN:
            self._unknown.append(oldest)
        write.outcome = max(write.outcome, outcome)
        write.in_flight -= 1
        write.end_if_over()

    def drain(self) -> None:
        """Wait for everything that was posted to end."""
        while self._posted:
            self.settle_oldest()

    def _submitted(self, batch: Descriptors) -> Pending:
        try:
            return self.channel.submit(batch)
        except Exception:
            log.exception("posting a batch failed: nobody knows what of it was posted")
            return _OfUnknownEnd()


class _OfUnknownEnd:
    def wait(self) -> Outcome:
        return Outcome.UNKNOWN


def _awaited(pending: Pending) -> Outcome:
    try:
        return pending.wait()
    except Exception:
        log.exception("waiting for a batch failed: nobody knows whether it has ended")
        return Outcome.UNKNOWN


def _may_repeat(write: Write) -> bool:
    try:
        return write.may_post
    except Exception:
        log.exception("nobody knows whether a batch that was cut is still wanted: it is not posted again")
        return False
