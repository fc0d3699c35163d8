"""Slots that another process may be writing to, and when they may be used again.

A slot is never reused while a remote write to it may be in flight. A reservation is WRITABLE from the moment its
slots are named to a prefill node. It ends in one of two ways: the writes landed and the slots go on with the request,
or the request no longer wants them and they are QUARANTINED until nothing can write to them any more. Either the writer
says so (`quiesced`). Or it is done with them, but something of it may linger on the way: it says that (`lingers`), or
it is proved dead (`writer_died`) or vouched to be (`evict`). Then a grace passes, and a fence is put behind all of it.
Silence proves nothing.

Something may also linger of writes that landed: a first copy of what was cut and posted again. It brings the same
bytes to the same slots, so the request that has them is not disturbed, and only the next owner would be. So the slots
go on with the request, and the table holds them too (LINGERING) until a fence has been put behind that copy: they are
free when both have let go. Such slots wait a while for a fence that is made for others. A fence cuts connections, and
what it cuts off is posted again and lingers: if each of them asked for a fence at once, fences would follow each other
as fast as prompts land.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from control.messages import AttemptId, Peer

DRAIN_GRACE_S = 5.0
"""What lingers arrives by itself within that, unless the network is in trouble. Then the fence keeps it out."""
LANDED_CAN_WAIT_S = 25.0
"""For so long, after the grace, slots that went on with a request wait for a fence that others need."""

Resource = TypeVar("Resource")


class Fence(Protocol):
    """Stands between everything that was under way when it was made and what comes later."""

    def passed(self) -> bool:
        """Whether nothing of that can land any more. Asked in every turn of a loop: a look, which takes no time."""
        ...


class NoFence:
    """Where nothing lingers."""

    def passed(self) -> bool:
        return True


class ReservationState(Enum):
    WRITABLE = "writable"
    """A writer was told of the slots, and a request wants what it writes."""
    QUARANTINED = "quarantined"
    """A writer was told of the slots, and nobody wants what it writes."""
    LINGERING = "lingering"
    """All has landed and a request has the slots. What was cut before may land again."""


@dataclass
class Reservation(Generic[Resource]):
    """Slots named to `writer` for an attempt."""

    attempt: AttemptId
    writer: Peer
    resource: Resource
    num_slots: int
    state: ReservationState = ReservationState.WRITABLE
    quarantined_at: float | None = None
    """Since when the resource is in quarantine (time.monotonic)."""
    free_after: float | None = None
    """When what a writer has left behind is fenced off (time.monotonic); None while it may still write."""
    can_wait_s: float = 0.0
    """For how long after that it waits for a fence that others need, before one is made for it."""

    @property
    def may_be_posted_to(self) -> bool:
        """Whether its writer may still post something; if not, it may only have left something behind."""
        return self.free_after is None

    def left_alone_for(self, now: float) -> float:
        """Seconds since the grace for what was left behind ended; less than 0 if it has not."""
        return -math.inf if self.free_after is None else now - self.free_after


class ReservationTable(Generic[Resource]):
    """Owns every resource that a remote writer may touch. `release` takes back what is safe to use again.

    `retain` adds an owner to a resource that a request has already: it takes a `release` more before it is free.
    `fence` makes a fence. One stands at a time, for all reservations whose grace had passed when it was made.
    """

    def __init__(
        self,
        release: Callable[[Resource], None],
        retain: Callable[[Resource], None],
        fence: Callable[[], Fence] = NoFence,
    ) -> None:
        self._release = release
        self._retain = retain
        self._make_fence = fence
        self._table: dict[AttemptId, Reservation[Resource]] = {}
        self._fence: Fence | None = None
        self._behind: list[Reservation[Resource]] = []
        """What becomes free when the fence has been passed."""

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._table

    def __iter__(self) -> Iterator[Reservation[Resource]]:
        # A copy: metrics are read while the owner changes the table.
        return iter(list(self._table.values()))

    @property
    def quarantined(self) -> list[Reservation[Resource]]:
        return [r for r in self if r.state is ReservationState.QUARANTINED]

    @property
    def quarantined_slots(self) -> int:
        return sum(r.num_slots for r in self.quarantined)

    def is_writable(self, attempt: AttemptId) -> bool:
        reservation = self._table.get(attempt)
        return reservation is not None and reservation.state is ReservationState.WRITABLE

    def open(self, attempt: AttemptId, writer: Peer, resource: Resource, num_slots: int) -> None:
        """Take ownership of a resource that is about to be named to `writer`."""
        if attempt in self._table:
            raise ValueError(f"reservation {attempt} is open already")
        self._table[attempt] = Reservation(attempt, writer, resource, num_slots)

    def landed(self, attempt: AttemptId) -> Resource:
        """The writer confirmed its last write and nothing lingers: the resource goes on with its request."""
        resource = self._writable(attempt).resource
        del self._table[attempt]
        return resource

    def landed_lingering(self, attempt: AttemptId, now: float) -> Resource:
        """The same where something may land again: the table stays an owner, beside the request, behind a fence."""
        reservation = self._writable(attempt)
        self._retain(reservation.resource)
        reservation.state = ReservationState.LINGERING
        reservation.can_wait_s = LANDED_CAN_WAIT_S
        self._end_writing(reservation, now)
        return reservation.resource

    def quarantine(self, attempt: AttemptId, now: float) -> Peer:
        """The request no longer wants the resource, and its writer may still be writing. Returns the writer."""
        reservation = self._table[attempt]
        if reservation.state is ReservationState.WRITABLE:
            reservation.state = ReservationState.QUARANTINED
            reservation.quarantined_at = now
        return reservation.writer

    def quiesced(self, attempt: AttemptId, boot_id: str) -> bool:
        """A process says that nothing is in flight and nothing will follow; only the writer can know.

        Whether a quarantined resource was released.
        """
        reservation = self._quarantined_of(attempt, boot_id)
        if reservation is None:
            return False
        del self._table[attempt]
        self._release(reservation.resource)
        return True

    def lingers(self, attempt: AttemptId, boot_id: str, now: float) -> bool:
        """A process says that nothing will follow, but that the network may still carry some; only the writer knows.

        Whether it speaks of a quarantined resource.
        """
        reservation = self._quarantined_of(attempt, boot_id)
        if reservation is None:
            return False
        self._end_writing(reservation, now)
        return True

    def writer_died(self, boot_id: str, now: float) -> list[AttemptId]:
        """That process is proved dead. Returns the attempts that it could still have been expected to fill."""
        lost = []
        for reservation in self:
            if reservation.writer.boot_id == boot_id and reservation.free_after is None:
                self._end_writing(reservation, now)
                if reservation.state is ReservationState.WRITABLE:
                    lost.append(reservation.attempt)
        return lost

    def evict(self, boot_id: str, now: float) -> list[AttemptId]:
        """Someone vouches that this process is gone for good. Returns the quarantined attempts that will be released.

        Only what is quarantined already: an attempt that is still wanted has to be given up first. Those that were
        evicted before, or whose writer is proved dead, keep their time. If the process does live and writes after the
        fence, it corrupts whatever uses the slots then.
        """
        evicted = [r for r in self.quarantined if r.writer.boot_id == boot_id]
        for reservation in evicted:
            self._end_writing(reservation, now)
        return [reservation.attempt for reservation in evicted]

    def release_expired(self, now: float) -> list[AttemptId]:
        """Release what nothing can write to any more. Returns its attempts. To be called again and again.

        A resource that lingering writes may reach comes back when its grace has passed and a fence after that.
        """
        if self._fence is None:
            self._behind = [r for r in self if r.state is not ReservationState.WRITABLE and r.left_alone_for(now) >= 0]
            if not any(r.left_alone_for(now) >= r.can_wait_s for r in self._behind):
                return []
            self._fence = self._make_fence()
        if not self._fence.passed():
            return []
        self._fence = None
        # Its writer may have been heard of meanwhile: some may be free already, and their attempts named again.
        freed = [r for r in self._behind if self._table.get(r.attempt) is r]
        for reservation in freed:
            del self._table[reservation.attempt]
            self._release(reservation.resource)
        return [reservation.attempt for reservation in freed]

    def _writable(self, attempt: AttemptId) -> Reservation[Resource]:
        if not self.is_writable(attempt):
            raise ValueError(f"reservation {attempt} is not writable")
        return self._table[attempt]

    def _quarantined_of(self, attempt: AttemptId, boot_id: str) -> Reservation[Resource] | None:
        reservation = self._table.get(attempt)
        if reservation is None or reservation.state is not ReservationState.QUARANTINED:
            return None
        return reservation if reservation.writer.boot_id == boot_id else None

    @staticmethod
    def _end_writing(reservation: Reservation[Resource], now: float) -> None:
        """Its writer posts nothing more. The first time counts."""
        if reservation.free_after is None:
            reservation.free_after = now + DRAIN_GRACE_S
