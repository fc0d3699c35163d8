"""Memory that other processes may write to, and when it may be used again.

A resource is never reused while a remote write to it may be in flight. Its reservation is WRITABLE from before the
resource is named to another node until all has landed, or until the owner gives it up. Then it is QUARANTINED until
nothing can write to it:

- each writer says that it is quiet (`quiesced`), which releases the resource at once; or
- it says that it posts nothing more but that bytes may linger (`quiesced` with `lingering`), is proved dead, or is gone
  by an operator's word (`writer_gone`). Then a grace passes, and then a fence.

Silence proves nothing. A node of several processes is as many writers. The node speaks for all of them. The death of a
process counts for that process alone.

Landed bytes may linger, too: a batch that was cut and posted again may arrive a second time, with the same bytes at the
same place. Only the next owner would be harmed. So the request uses the resource, and the table holds it as well
(LINGERING) until a fence has passed. It waits a while for a fence that others need: a fence cuts connections, what it
cuts is posted again and lingers, so fences would follow each other as fast as data lands.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

DRAIN_GRACE_S = 5.0
"""Most lingering bytes have arrived by then. The fence keeps out the rest."""
LANDED_CAN_WAIT_S = 25.0
"""How long after the grace a LINGERING resource waits for a fence that others need."""

KeyT = TypeVar("KeyT", bound=Hashable)
ResourceT = TypeVar("ResourceT")


class Process(Protocol):
    @property
    def boot_id(self) -> str:
        """Drawn anew at each start of the process."""


ProcessT = TypeVar("ProcessT", bound=Process)


class Fence(Protocol):
    """Separates the writes that were in flight when it was made from later ones."""

    def passed(self) -> bool:
        """Whether none of them can land any more. Does not block."""


class ReservationState(Enum):
    WRITABLE = "writable"
    """Named to writers, and what they write is wanted."""
    QUARANTINED = "quarantined"
    """Named to writers, and what they write is not wanted."""
    LINGERING = "lingering"
    """All has landed and is used. A first copy of some of it may still arrive."""


@dataclass
class Writer(Generic[ProcessT]):
    """A process that the resource was named to, and that may have writes in flight."""

    peer: ProcessT
    free_after: float | None = None
    """The end of its grace (time.monotonic); None while it may post."""

    @property
    def may_post(self) -> bool:
        return self.free_after is None

    def seconds_left(self, now: float) -> float | None:
        """Of its grace; None while it may post."""
        return None if self.free_after is None else max(0.0, self.free_after - now)

    def end(self, now: float) -> None:
        """The process posts nothing more. The first call counts."""
        if self.free_after is None:
            self.free_after = now + DRAIN_GRACE_S


@dataclass
class Reservation(Generic[KeyT, ProcessT, ResourceT]):
    """A resource named to `node`. writers: the node's processes, without those that are known to be quiet."""

    key: KeyT
    node: ProcessT
    writers: list[Writer[ProcessT]]
    resource: ResourceT
    num_slots: int
    state: ReservationState = ReservationState.WRITABLE
    quarantined_at: float | None = None
    can_wait_s: float = 0.0

    def writers_of(self, boot_id: str) -> list[Writer[ProcessT]]:
        return [writer for writer in self.writers if writer.peer.boot_id == boot_id]

    def waiting_for_fence(self, now: float) -> float:
        """Seconds since the last writer's grace ended; negative before that."""
        ends = [math.inf if writer.free_after is None else writer.free_after for writer in self.writers]
        return now - max(ends, default=now)


class ReservationTable(Generic[KeyT, ProcessT, ResourceT]):
    """Owns every resource that another process may write to.

    release: frees a resource that is safe to use again. retain: adds an owner, so that the resource takes one release
    more. fence: makes a fence. There is one at a time, for all reservations whose grace ended before.
    """

    def __init__(
        self,
        release: Callable[[ResourceT], None],
        retain: Callable[[ResourceT], None],
        fence: Callable[[], Fence],
    ) -> None:
        self._release = release
        self._retain = retain
        self._make_fence = fence
        self._table: dict[KeyT, Reservation[KeyT, ProcessT, ResourceT]] = {}
        self._fence: Fence | None = None
        self._fenced: list[Reservation[KeyT, ProcessT, ResourceT]] = []
        """Free when the fence has passed."""

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[Reservation[KeyT, ProcessT, ResourceT]]:
        # A copy: metrics are read while the owner changes the table.
        return iter(list(self._table.values()))

    @property
    def quarantined(self) -> list[Reservation[KeyT, ProcessT, ResourceT]]:
        return [r for r in self if r.state is ReservationState.QUARANTINED]

    @property
    def lingering(self) -> list[ResourceT]:
        return [r.resource for r in self if r.state is ReservationState.LINGERING]

    def is_writable(self, key: KeyT) -> bool:
        reservation = self._table.get(key)
        return reservation is not None and reservation.state is ReservationState.WRITABLE

    def open(
        self, key: KeyT, node: ProcessT, resource: ResourceT, num_slots: int, ranks: Sequence[ProcessT] = ()
    ) -> None:
        """Own a resource before it is named to `node`. ranks: the node's other processes."""
        if key in self._table:
            raise ValueError(f"reservation {key} is open already")
        writers = [Writer(peer) for peer in (node, *ranks)]
        self._table[key] = Reservation(key, node, writers, resource, num_slots)

    def landed(self, key: KeyT, now: float, lingering: bool = False) -> ResourceT:
        """All writes have landed. Returns the resource, which the caller owns.

        lingering: bytes may land again, so the table stays an owner, too, until a fence has passed.
        """
        if not self.is_writable(key):
            raise ValueError(f"reservation {key} is not writable")
        reservation = self._table[key]
        if lingering:
            self._retain(reservation.resource)
            reservation.state = ReservationState.LINGERING
            reservation.can_wait_s = LANDED_CAN_WAIT_S
            for writer in reservation.writers:
                writer.end(now)
        else:
            del self._table[key]
        return reservation.resource

    def quarantine(self, key: KeyT, now: float) -> ProcessT:
        """Give the resource up while writers may still write. Returns the node that it was named to."""
        reservation = self._table[key]
        if reservation.state is ReservationState.WRITABLE:
            reservation.state = ReservationState.QUARANTINED
            reservation.quarantined_at = now
        return reservation.node

    def quiesced(self, key: KeyT, boot_id: str, now: float, lingering: bool = False) -> bool:
        """That process posts nothing more, and has nothing in flight except what is `lingering` in the network.

        The node speaks for all writers, any other process for itself. The resource is released when no writer is left.
        Returns whether the call was about a quarantined resource to which no process posts any more.
        """
        reservation = self._table.get(key)
        if reservation is None or reservation.state is not ReservationState.QUARANTINED:
            return False
        by_node = boot_id == reservation.node.boot_id
        spoken_for = list(reservation.writers) if by_node else reservation.writers_of(boot_id)
        for writer in spoken_for:
            if lingering:
                writer.end(now)
            else:
                reservation.writers.remove(writer)
        if not reservation.writers:
            del self._table[key]
            self._release(reservation.resource)
        return bool(spoken_for) and not any(writer.may_post for writer in reservation.writers)

    def writer_gone(self, boot_id: str, now: float) -> None:
        """That process is proved dead, or gone for good by an operator's word. That counts for what is quarantined.

        A grace that has begun goes on. If the process writes after the fence, it corrupts the next owner's data.
        """
        for reservation in self.quarantined:
            for writer in reservation.writers_of(boot_id):
                writer.end(now)

    def release_expired(self, now: float) -> list[KeyT]:
        """Release what nothing can write to any more. Returns the keys. Call it repeatedly."""
        if self._fence is None:
            self._fenced = [
                r for r in self if r.state is not ReservationState.WRITABLE and r.waiting_for_fence(now) >= 0
            ]
            if not any(r.waiting_for_fence(now) >= r.can_wait_s for r in self._fenced):
                return []
            self._fence = self._make_fence()
        if not self._fence.passed():
            return []
        self._fence = None
        # Some may have been released meanwhile by `quiesced`.
        freed = [r for r in self._fenced if self._table.get(r.key) is r]
        for reservation in freed:
            del self._table[reservation.key]
            self._release(reservation.resource)
        return [reservation.key for reservation in freed]
