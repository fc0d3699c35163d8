"""Keeps batches in flight to a decode node, over any transport, and knows when they have ended.

Fencing rests on this: a write has ended when its transport knows of nothing more of it, and its `Outcome` says whether
the network may still hold some.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import structlog

from transfer.choices import Transport
from transfer.planner import Descriptors

log = structlog.get_logger(__name__)

BATCHES_IN_FLIGHT = 8
"""Enough to keep a transport busy, and few enough that the send buffers stay in the processor's cache."""


class TransferError(Exception):
    """Some of a write failed."""


class Outcome(IntEnum):
    """How what was posted ended, the best first. Of several, the worst counts."""

    LANDED = 0
    FAILED = 1
    """Refused: nothing of it is on its way."""
    CUT = 2
    """Its connection was closed. Another one may carry it."""
    GIVEN_UP = 3
    """The transport heard nothing for too long and stopped waiting."""
    UNKNOWN = 4
    """Posting it or waiting for its end raised: it counts as in flight for as long as this process runs.

    A fence does not help: Mooncake may have queued descriptors that go out over a connection that does not exist yet.
    So what the batch reads stays in place, and the receiver's slots are free when this process is proved dead. Shared
    memory has no such outcome: when all threads have left a copy nothing is in flight, even if one raised (FAILED).
    """

    @property
    def lingers(self) -> bool:
        """Whether bytes of it may land later: the network and both kernels keep what they have taken."""
        return self >= Outcome.CUT


class Pending(Protocol):
    """A batch that was posted."""

    def wait(self) -> Outcome:
        """Return when all of its descriptors have ended. If this raises, nobody knows how they ended."""
        ...


class Channel(Protocol):
    """The way to one decode node. Used by one thread."""

    transport: Transport
    max_batch: int
    """Descriptors of one batch, of which BATCHES_IN_FLIGHT are posted at a time."""
    max_bytes: int
    """Bytes of one descriptor."""
    attempts: int
    """How often a batch is posted that is cut again and again."""

    def submit(self, batch: Descriptors) -> Pending:
        """Post a batch. What cannot be posted has failed. If this raises, nobody knows what was posted."""
        ...

    def check(self) -> None:
        """Raise TransferError if the process that was written to has ended."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Write:
    """Batches that belong together.

    on_end: called once, when the write is closed and all of it has ended or is UNKNOWN. go_on: asked before each post;
    it may wait, and says whether the write is still wanted.
    """

    on_end: Callable[[], None]
    go_on: Callable[[], bool]
    outcome: Outcome = Outcome.LANDED
    """Of what has ended so far. What was cut, posted again and landed counts as landed."""
    lingers: bool = False
    """Whether bytes of it may still land, also if all of it has landed: the first copy of what was cut may arrive
    later, with the same bytes at the same place."""
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
    pending: Pending | None
    write: Write
    buffer: object


class Pipeline:
    """The batches in flight over one channel, oldest first, of one write after another.

    The next write is posted before the last has ended, so the transport never runs dry. One thread uses it, and all
    callbacks are called there. If a channel raises, the outcome of that batch is UNKNOWN.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._posted: deque[_Posted] = deque()
        self._unknown: list[_Posted] = []
        """Batches whose outcome is UNKNOWN: the buffers that they were posted from are held for good."""

    @property
    def is_empty(self) -> bool:
        return not self._posted

    @property
    def held(self) -> set[object]:
        """The send buffers of what is in flight, and None if something is that was posted from elsewhere."""
        return {posted.buffer for posted in (*self._posted, *self._unknown)}

    @property
    def lost_track(self) -> bool:
        """Whether something may be in flight for good: its memory and the channel must stay."""
        return bool(self._unknown)

    def post(self, write: Write, batch: Descriptors, buffer: object = None) -> bool:
        """Post a batch, in pieces that the channel takes, while its write goes on and nothing of it has failed.

        buffer: the send buffer that it is read from, if any; held until the batch has ended.
        Returns whether all of it was posted.
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
        """Nothing more will be posted of the write."""
        write.closed = True
        write.end_if_over()

    def settle_oldest(self) -> None:
        """Wait for the oldest batch to end. One that was cut is posted again: the same bytes to the same place."""
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

    def _submitted(self, batch: Descriptors) -> Pending | None:
        """The batch as posted, or None if nobody knows what of it was."""
        try:
            return self.channel.submit(batch)
        except Exception:
            # Whatever it is: were it raised, the write would seem to have ended, and its slots would be given away.
            log.exception("posting a batch failed: nobody knows what of it was posted")
            return None


def _awaited(pending: Pending | None) -> Outcome:
    try:
        return Outcome.UNKNOWN if pending is None else pending.wait()
    except Exception:
        # Likewise.
        log.exception("waiting for a batch failed: nobody knows whether it has ended")
        return Outcome.UNKNOWN


def _may_repeat(write: Write) -> bool:
    try:
        return write.may_post
    except Exception:
        log.exception("nobody knows whether a batch that was cut is still wanted: it is not posted again")
        return False
