"""Slots that another process may be writing to, and when they may be used again.

A slot is never reused while a remote write to it may be in flight. A reservation is WRITABLE from the moment its
slots are named to a prefill node. It ends in one of two ways: the writes landed and the slots go on with the request,
or the request no longer wants them and they are QUARANTINED until nothing can write to them any more. Either the writer
says so (`quiesced`). Or it is done with them, but something of it may linger on the way: it says that (`lingers`), or
it is proved dead (`writer_died`) or vouched to be (`evict`). Then a grace passes, and a fence is put behind all of it.
Silence proves nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from control.messages import Peer

DRAIN_GRACE_S = 5.0
"""What lingers arrives by itself within that, unless the network is in trouble. Then the fence keeps it out."""

Resource = TypeVar("Resource")
Key = tuple[str, int]


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
    QUARANTINED = "quarantined"


@dataclass
class Reservation(Generic[Resource]):
    """Slots named to `writer` under (request_id, epoch)."""

    key: Key
    writer: Peer
    resource: Resource
    num_slots: int
    state: ReservationState = ReservationState.WRITABLE
    quarantined_at: float | None = None
    """Since when the resource is in quarantine (time.monotonic)."""
    free_after: float | None = None
    """When what a writer has left behind is fenced off (time.monotonic); None while it may still write."""


class ReservationTable(Generic[Resource]):
    """Owns every resource that a remote writer may touch. `release` takes back what is safe to use again.

    `fence` makes a fence. One stands at a time, for all reservations whose grace had passed when it was made.
    """

    def __init__(self, release: Callable[[Resource], None], fence: Callable[[], Fence] = NoFence) -> None:
        self._release = release
        self._make_fence = fence
        self._table: dict[Key, Reservation[Resource]] = {}
        self._fence: Fence | None = None
        self._behind: list[Reservation[Resource]] = []
        """What becomes free when the fence has been passed."""

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: Key) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[Reservation[Resource]]:
        # A copy: metrics are read while the owner changes the table.
        return iter(list(self._table.values()))

    @property
    def quarantined(self) -> list[Reservation[Resource]]:
        return [r for r in self if r.state is ReservationState.QUARANTINED]

    @property
    def quarantined_slots(self) -> int:
        return sum(r.num_slots for r in self.quarantined)

    def is_writable(self, key: Key) -> bool:
        reservation = self._table.get(key)
        return reservation is not None and reservation.state is ReservationState.WRITABLE

    def open(self, key: Key, writer: Peer, resource: Resource, num_slots: int) -> None:
        """Take ownership of a resource that is about to be named to `writer`."""
        if key in self._table:
            raise ValueError(f"reservation {key} is open already")
        self._table[key] = Reservation(key, writer, resource, num_slots)

    def landed(self, key: Key) -> Resource:
        """The writer confirmed its last write: the resource goes on with its request."""
        if not self.is_writable(key):
            raise ValueError(f"reservation {key} is not writable")
        return self._table.pop(key).resource

    def quarantine(self, key: Key, now: float) -> Peer:
        """The request no longer wants the resource, and its writer may still be writing. Returns the writer."""
        reservation = self._table[key]
        if reservation.state is not ReservationState.QUARANTINED:
            reservation.state = ReservationState.QUARANTINED
            reservation.quarantined_at = now
        return reservation.writer

    def quiesced(self, key: Key, boot_id: str) -> bool:
        """A process says that nothing is in flight and nothing will follow; only the writer can know.

        Whether a quarantined resource was released.
        """
        reservation = self._quarantined_of(key, boot_id)
        if reservation is None:
            return False
        del self._table[key]
        self._release(reservation.resource)
        return True

    def lingers(self, key: Key, boot_id: str, now: float) -> bool:
        """A process says that nothing will follow, but that the network may still carry some; only the writer knows.

        Whether it speaks of a quarantined resource.
        """
        reservation = self._quarantined_of(key, boot_id)
        if reservation is None:
            return False
        self._end_writing(reservation, now)
        return True

    def writer_died(self, boot_id: str, now: float) -> list[Key]:
        """That process is proved dead. Returns the keys that it could still have been expected to fill."""
        lost = []
        for reservation in self:
            if reservation.writer.boot_id == boot_id and reservation.free_after is None:
                self._end_writing(reservation, now)
                if reservation.state is ReservationState.WRITABLE:
                    lost.append(reservation.key)
        return lost

    def evict(self, boot_id: str, now: float) -> list[Key]:
        """Someone vouches that this process is gone for good. Returns the quarantined keys that will be released.

        Only what is quarantined already: an attempt that is still wanted has to be given up first. Those that were
        evicted before, or whose writer is proved dead, keep their time. If the process does live and writes after the
        fence, it corrupts whatever uses the slots then.
        """
        evicted = [r for r in self.quarantined if r.writer.boot_id == boot_id]
        for reservation in evicted:
            self._end_writing(reservation, now)
        return [reservation.key for reservation in evicted]

    def release_expired(self, now: float) -> list[Key]:
        """Release what nothing can write to any more. Returns its keys. To be called again and again.

        A resource that lingering writes may reach comes back when its grace has passed and a fence after that.
        """
        if self._fence is None:
            self._behind = [r for r in self.quarantined if r.free_after is not None and r.free_after <= now]
            if not self._behind:
                return []
            self._fence = self._make_fence()
        if not self._fence.passed():
            return []
        self._fence = None
        # Its writer may have been heard of meanwhile: some may be free already, and their keys used again.
        freed = [r for r in self._behind if self._table.get(r.key) is r]
        for reservation in freed:
            del self._table[reservation.key]
            self._release(reservation.resource)
        return [reservation.key for reservation in freed]

    def _quarantined_of(self, key: Key, boot_id: str) -> Reservation[Resource] | None:
        reservation = self._table.get(key)
        if reservation is None or reservation.state is not ReservationState.QUARANTINED:
            return None
        return reservation if reservation.writer.boot_id == boot_id else None

    @staticmethod
    def _end_writing(reservation: Reservation[Resource], now: float) -> None:
        """Its writer posts nothing more. The first time counts."""
        if reservation.free_after is None:
            reservation.free_after = now + DRAIN_GRACE_S
