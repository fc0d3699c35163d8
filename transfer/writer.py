"""Batches in flight over any transport, and their end. Reads go the same way.

Fencing rests on this rule: a write has ended when its transport has nothing of it in flight. Its `Outcome` says whether
the network may still hold some.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import structlog

from transfer.choices import Transport
from transfer.planner import Descriptors

log = structlog.get_logger(__name__)

BATCHES_IN_FLIGHT = 8
"""Keeps a transport busy, while the send buffers stay in the processor's cache."""


class TransferError(Exception):
    """Some of a write failed."""


class Outcome(IntEnum):
    """How a batch or a write ended, the best first. Of several, the worst counts."""

    LANDED = 0
    FAILED = 1
    """Refused: nothing of it is in flight."""
    CUT = 2
    """The connection was closed. Another one may carry it."""
    GIVEN_UP = 3
    """The transport heard nothing for too long."""
    UNKNOWN = 4
    """Posting or waiting raised: it counts as in flight for as long as this process runs.

    A fence does not help: Mooncake may send queued descriptors over a later connection. So the source stays in place,
    and the receiver's slots are free when this process is proved dead. Shared memory has no such outcome.
    """

    @property
    def lingers(self) -> bool:
        """Whether bytes may land later: the network and both kernels keep what they have taken."""
        return self >= Outcome.CUT


_FAILURES = {
    Outcome.FAILED: "the other process cannot be reached or refuses a {}",
    Outcome.CUT: "the connection was lost",
    Outcome.GIVEN_UP: "the transport gave a {} up",
    Outcome.UNKNOWN: "nobody knows whether a {} has ended",
}


Pending = Callable[[], Outcome]
"""A posted batch: returns when all descriptors have ended. If it raises, the outcome is UNKNOWN."""


class Channel(Protocol):
    """A connection to one decode node. Used by one thread."""

    transport: Transport
    max_batch: int
    """Descriptors of one batch. BATCHES_IN_FLIGHT batches are posted at a time."""
    max_bytes: int
    """Bytes of one descriptor."""
    attempts: int
    """Posts of a batch that is cut each time."""

    def submit(self, batch: Descriptors) -> Pending:
        """Post a batch. If this raises, the outcome is UNKNOWN."""
        ...

    def check(self) -> None:
        """Raise TransferError if the process on the other side has ended. Not if it acknowledges what ended well."""
        return

    def close(self) -> None:
        return


@dataclass(eq=False)
class Write:
    """Batches that belong together.

    on_end: called once, when the write is closed and all of it has ended or is UNKNOWN. go_on: whether the write is
    still wanted; asked before each post; may wait. kind: what errors call it. num_bytes, num_descriptors: of the
    batches that were to be posted.
    """

    on_end: Callable[[], None]
    go_on: Callable[[], bool]
    kind: Literal["write", "read"] = "write"
    num_bytes: int = 0
    num_descriptors: int = 0
    is_aborted: bool = False
    """Whether some of it was not posted."""
    outcome: Outcome = Outcome.LANDED
    """Of what has ended. A batch that was cut, posted again and landed counts as landed."""
    lingers: bool = False
    """Whether bytes may still land, such as the first copy of a batch that was cut and posted again."""
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
    """The batches in flight over one channel, oldest first.

    The next write is posted before the last has ended, so the transport stays busy. One thread uses it and runs all
    callbacks. If a channel raises, the outcome of that batch is UNKNOWN.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._posted: deque[_Posted] = deque()
        self._unknown: list[_Posted] = []
        """Batches whose outcome is UNKNOWN. Their buffers are held for good."""

    @property
    def is_empty(self) -> bool:
        return not self._posted

    @property
    def held(self) -> set[object]:
        """The send buffers in use, and None if a batch without one is in flight."""
        return {posted.buffer for posted in (*self._posted, *self._unknown)}

    @property
    def lost_track(self) -> bool:
        """Whether something may be in flight for good, so that its memory and the channel must stay."""
        return bool(self._unknown)

    def post(self, write: Write, batch: Descriptors, buffer: object = None) -> bool:
        """Post a batch, in pieces that the channel takes, while its write goes on and nothing of it has failed.

        buffer: its send buffer, if any; held until the batch has ended. Returns whether all of it was posted.
        """
        write.num_bytes += int(batch.lengths.sum())
        write.num_descriptors += len(batch.lengths)
        for piece in batch.split(self.channel.max_batch):
            while len(self._posted) >= BATCHES_IN_FLIGHT:
                self.settle_oldest()
            if not write.may_post:
                write.is_aborted = True
                return False
            self._posted.append(_Posted(piece, self._submitted(piece), write, buffer))
            write.in_flight += 1
        return True

    def close(self, write: Write) -> None:
        write.closed = True
        write.end_if_over()

    def failure_reason(self, write: Write) -> str | None:
        """Why a write that has ended did not land, or None."""
        if write.outcome is not Outcome.LANDED:
            return _FAILURES[write.outcome].format(write.kind)
        if write.is_aborted:
            return "aborted"
        try:
            self.channel.check()
        except TransferError as error:
            return str(error)
        return None

    def settle_oldest(self) -> None:
        """Wait for the oldest batch to end. A batch that was cut is posted again."""
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
        """The posted batch, or None if it is unknown what was posted."""
        try:
            return self.channel.submit(batch)
        except Exception:
            # If it were raised, the write would seem to have ended, and its slots would be reused.
            log.exception("posting a batch failed: nobody knows what of it was posted")
            return None


def _awaited(pending: Pending | None) -> Outcome:
    try:
        return Outcome.UNKNOWN if pending is None else pending()
    except Exception:
        log.exception("waiting for a batch failed: nobody knows whether it has ended")
        return Outcome.UNKNOWN


def _may_repeat(write: Write) -> bool:
    try:
        return write.may_post
    except Exception:
        log.exception("nobody knows whether a batch that was cut is still wanted: it is not posted again")
        return False
