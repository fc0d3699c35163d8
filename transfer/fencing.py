"""Slots that another process may write to, and when they may be used again.

A slot is never reused while a remote write to it may be in flight. A reservation is WRITABLE from before its slots are
named to a prefill node until either all has landed, and the slots go on with the request, or the request gives them up,
and they are QUARANTINED until nothing can write to them any more: the writer says so (`quiesced`), or it says that it
posts nothing more but that something may still arrive (`quiesced` with `lingering`), or it is proved dead
(`writer_died`) or an operator vouches that it is gone (`evict`). In the last three cases a grace passes and then a
fence. Silence proves nothing.

A prefill node of several ranks is as many writers, each of which has to be done. What the node says of an attempt it
says for all of its ranks, since each has told it so; that a process is dead or gone counts for that process alone.

What landed may linger too: the first copy of a batch that was cut and posted again arrives later, with the same bytes
for the same slots. That harms only the next owner of the slots, so the request has them and the table holds them beside
it (LINGERING) until a fence has passed. Such slots wait a while for a fence that others need: a fence cuts connections,
and what it cuts is posted again and lingers, so fences would follow each other as fast as prompts land.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

DRAIN_GRACE_S = 5.0
"""Most of what lingers has arrived by then. The fence keeps out the rest."""
LANDED_CAN_WAIT_S = 25.0
"""How long, after the grace, slots that went on with a request wait for a fence that others need."""

KeyT = TypeVar("KeyT", bound=Hashable)
"""What a reservation is known by, such as an attempt."""
ResourceT = TypeVar("ResourceT")


class Process(Protocol):
    """A process of another node."""

    @property
    def boot_id(self) -> str:
        """Drawn anew at each start of the process."""
        ...


ProcessT = TypeVar("ProcessT", bound=Process)


class Fence(Protocol):
    """Separates the writes that were under way when it was made from what comes later."""

    def passed(self) -> bool:
        """Whether none of them can land any more. Takes no time: a loop asks in every turn."""
        ...


class ReservationState(Enum):
    WRITABLE = "writable"
    """The slots were named to a writer, and a request wants what it writes."""
    QUARANTINED = "quarantined"
    """The slots were named to a writer, and nobody wants what it writes."""
    LINGERING = "lingering"
    """All has landed and a request has the slots. A first copy of some of it may still arrive."""


@dataclass
class Writer(Generic[ProcessT]):
    """A process that slots were named to, of which it is not known that nothing of it is under way."""

    peer: ProcessT
    free_after: float | None = None
    """When its grace ends (time.monotonic); None while it may still post."""

    @property
    def may_post(self) -> bool:
        return self.free_after is None

    def end(self, now: float) -> None:
        """It posts nothing more. The first call counts."""
        if self.free_after is None:
            self.free_after = now + DRAIN_GRACE_S


@dataclass
class Reservation(Generic[KeyT, ProcessT, ResourceT]):
    """Slots named under a key to `node`, and so to its ranks.

    writers: the node and its ranks, without those that are known to be quiet.
    """

    key: KeyT
    node: ProcessT
    writers: list[Writer[ProcessT]]
    resource: ResourceT
    num_slots: int
    state: ReservationState = ReservationState.WRITABLE
    quarantined_at: float | None = None
    """time.monotonic."""
    can_wait_s: float = 0.0
    """How long after the grace it waits for a fence that others need."""

    @property
    def may_be_posted_to(self) -> bool:
        """Whether a writer may still post something."""
        return any(writer.may_post for writer in self.writers)

    def writers_of(self, boot_id: str) -> list[Writer[ProcessT]]:
        """The writer that is that process, if one is."""
        return [writer for writer in self.writers if writer.peer.boot_id == boot_id]

    def writers_spoken_for_by(self, boot_id: str) -> list[Writer[ProcessT]]:
        """All if that process is the node, otherwise `writers_of` it."""
        return list(self.writers) if boot_id == self.node.boot_id else self.writers_of(boot_id)

    def waiting_for_fence(self, now: float) -> float:
        """Seconds since the grace of the last writer ended; negative if it has not."""
        ends = [math.inf if writer.free_after is None else writer.free_after for writer in self.writers]
        return now - max(ends, default=now)


class ReservationTable(Generic[KeyT, ProcessT, ResourceT]):
    """Owns every resource that a remote writer may touch.

    release: takes back what is safe to use again. retain: adds an owner to a resource that a request has, so that it
    takes one release more. fence: makes one; there is one at a time, for all reservations whose grace ended before.
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
        self._behind: list[Reservation[KeyT, ProcessT, ResourceT]] = []
        """What becomes free when the fence has passed."""

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
    def quarantined_slots(self) -> int:
        return sum(r.num_slots for r in self.quarantined)

    def is_writable(self, key: KeyT) -> bool:
        reservation = self._table.get(key)
        return reservation is not None and reservation.state is ReservationState.WRITABLE

    def open(
        self, key: KeyT, node: ProcessT, resource: ResourceT, num_slots: int, ranks: Sequence[ProcessT] = ()
    ) -> None:
        """Take ownership of a resource that is about to be named to `node`. ranks: the node's other processes."""
        if key in self._table:
            raise ValueError(f"reservation {key} is open already")
        writers = [Writer(peer) for peer in (node, *ranks)]
        self._table[key] = Reservation(key, node, writers, resource, num_slots)

    def landed(self, key: KeyT, now: float, lingering: bool = False) -> ResourceT:
        """The node confirmed the last write of all writers: the resource goes on with its request.

        lingering: something may land again, so the table stays an owner, too, until a fence has passed.
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
        """The request gives the resource up, and its writers may still write. Returns the node that was asked."""
        reservation = self._table[key]
        if reservation.state is ReservationState.WRITABLE:
            reservation.state = ReservationState.QUARANTINED
            reservation.quarantined_at = now
        return reservation.node

    def quiesced(self, key: KeyT, boot_id: str, now: float, lingering: bool = False) -> bool:
        """That process says that nothing is in flight and nothing will follow.

        It counts for all writers if that is the node that was asked, and for itself if it is another of them. When
        nothing can come from any, the resource is released: at once, or, if the network may still carry something
        (`lingering`), behind a fence. Returns whether it is about a quarantined resource that nobody posts to any more.
        """
        reservation = self._table.get(key)
        if reservation is None or reservation.state is not ReservationState.QUARANTINED:
            return False
        spoken_for = reservation.writers_spoken_for_by(boot_id)
        for writer in spoken_for:
            if lingering:
                writer.end(now)
            else:
                reservation.writers.remove(writer)
        if not reservation.writers:
            del self._table[key]
            self._release(reservation.resource)
        return bool(spoken_for) and not reservation.may_be_posted_to

    def writer_died(self, boot_id: str, now: float) -> list[KeyT]:
        """That process is proved dead. Returns the attempts that were waiting for it."""
        lost = []
        for reservation in self:
            for writer in reservation.writers_of(boot_id):
                if writer.may_post and reservation.state is ReservationState.WRITABLE:
                    lost.append(reservation.key)
                writer.end(now)
        return lost

    def evict(self, boot_id: str, now: float) -> list[KeyT]:
        """An operator vouches that this process is gone for good. Returns the attempts that it was a writer of.

        Only those that are quarantined; a grace that has begun goes on. If the process lives and writes after the
        fence, it corrupts whatever uses the slots then.
        """
        evicted = [(r, writer) for r in self.quarantined for writer in r.writers_of(boot_id)]
        for _, writer in evicted:
            writer.end(now)
        return [reservation.key for reservation, _ in evicted]

    def release_expired(self, now: float) -> list[KeyT]:
        """Release what nothing can write to any more, and return its attempts. To be called again and again."""
        if self._fence is None:
            self._behind = [
                r for r in self if r.state is not ReservationState.WRITABLE and r.waiting_for_fence(now) >= 0
            ]
            if not any(r.waiting_for_fence(now) >= r.can_wait_s for r in self._behind):
                return []
            self._fence = self._make_fence()
        if not self._fence.passed():
            return []
        self._fence = None
        # Some may have been released meanwhile, at their writer's word.
        freed = [r for r in self._behind if self._table.get(r.key) is r]
        for reservation in freed:
            del self._table[reservation.key]
            self._release(reservation.resource)
        return [reservation.key for reservation in freed]
