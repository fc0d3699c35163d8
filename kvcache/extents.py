"""Which slots of a pool are free: contiguity-first allocation with a reference count per slot."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transfer.planner import expand_extents, plan_runs

BlockValues = npt.NDArray[np.int32]
"""[blocks, width]: where the KV of cached blocks is."""


class SlotAccountingError(RuntimeError):
    """A slot was released or retained while free, or a pool's books do not add up: always a bug, never load."""


class Extent(NamedTuple):
    """The slots [start, start + length)."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def expand(extents: Iterable[Extent]) -> npt.NDArray[np.int64]:
    """Every slot of the extents, in their order: int64 [total length]."""
    return expand_extents(tuple(extents))


def extents_of(slots: npt.NDArray[np.integer]) -> tuple[Extent, ...]:
    """Slots [n] as extents, in their order."""
    return tuple(Extent(start, length) for start, _, length in common_runs(slots, slots))


def common_runs(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> list[tuple[int, int, int]]:
    """Slots [n] of two pools, as runs that are consecutive in both: the first slot in each, and how many."""
    runs = plan_runs(a.astype(np.int64, copy=False), b.astype(np.int64, copy=False))
    return list(zip(runs.sources.tolist(), runs.destinations.tolist(), runs.lengths.tolist(), strict=True))


@dataclass(frozen=True)
class HeldBlocks:
    """Blocks of one prompt, from its beginning, that are held. numbers: int64 [blocks]. values: int32 [blocks, width],
    a copy."""

    numbers: npt.NDArray[np.int64]
    values: BlockValues

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class HostSlots:
    """The slots of one sequence, in order: the i-th host slot holds position i; of a paged pool, slots are pages.

    There may be more slots than tokens; the rest is room to grow. held: blocks of the prefix cache that are held as
    long as these slots have an owner.
    """

    extents: tuple[Extent, ...]
    held: HeldBlocks | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return sum(extent.length for extent in self.extents)

    @property
    def held_blocks(self) -> int:
        return 0 if self.held is None else len(self.held)

    def slots(self) -> npt.NDArray[np.int64]:
        """The slots in position order, int64 [len(self)]."""
        return expand(self.extents)

    def extend(self, extents: Iterable[Extent]) -> "HostSlots":
        """These slots followed by more; a last extent that is continued is joined."""
        joined = list(self.extents)
        for extent in extents:
            if joined and joined[-1].stop == extent.start:
                joined[-1] = Extent(joined[-1].start, joined[-1].length + extent.length)
            else:
                joined.append(extent)
        return replace(self, extents=tuple(joined))

    def cut(self, first: int) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
        """The extents of the first `first` slots, and those of the others."""
        head: list[Extent] = []
        tail: list[Extent] = []
        for extent in self.extents:
            here = min(first, extent.length)
            first -= here
            if here:
                head.append(Extent(extent.start, here))
            if here < extent.length:
                tail.append(Extent(extent.start + here, extent.length - here))
        return tuple(head), tuple(tail)


NO_SLOTS = HostSlots(())


class SlotAllocator:
    """Hands out slots [0, num_slots) in as few extents as possible and takes them back when nobody refers to them.

    Free extents are kept coalesced, by start and by stop (to find neighbours) and by length (to find the best fit). An
    operation costs the same per extent, whatever the number of slots and of free extents; only the list of different
    lengths is sorted. Not thread-safe: one thread owns a pool.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = 0
        self._references = np.zeros(num_slots, dtype=np.int32)
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._starts_of: dict[int, OrderedDict[int, None]] = {}
        """By length, the earliest freed first."""
        self._lengths: list[int] = []
        if num_slots:
            self._give(Extent(0, num_slots))

    @property
    def used(self) -> int:
        return self.num_slots - self.free

    def allocate(self, count: int) -> tuple[Extent, ...] | None:
        """Take `count` slots, each with one reference, or None if fewer are free.

        One extent if any free one is big enough (the smallest such: best fit), otherwise the largest ones first,
        which makes the number of extents minimal.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} slots")
        if count > self.free:
            return None
        taken: list[Extent] = []
        while count:
            length = self._lengths[min(bisect_left(self._lengths, count), len(self._lengths) - 1)]
            start = next(iter(self._starts_of[length]))
            self._remove(start)
            extent = Extent(start, min(count, length))
            if extent.length < length:
                self._insert(Extent(extent.stop, length - extent.length))
            self._references[extent.start : extent.stop] = 1
            self.free -= extent.length
            count -= extent.length
            taken.append(extent)
        return tuple(taken)

    def retain(self, extents: Iterable[Extent]) -> None:
        """Add a reference to every slot. Raises SlotAccountingError if one is free."""
        for extent in extents:
            self._held(extent)[:] += 1

    def release(self, extents: Iterable[Extent]) -> None:
        """Drop a reference to every slot; those with none left become free.

        Raises SlotAccountingError if a slot is free already (a double free).
        """
        for extent in extents:
            references = self._held(extent)
            references -= 1
            for begin, end in _runs(references == 0):
                self._give(Extent(extent.start + begin, end - begin))

    def num_owned_once(self, extents: Iterable[Extent]) -> int:
        """How many of these slots have one reference."""
        return sum(int(np.count_nonzero(self._held(extent) == 1)) for extent in extents)

    def check_held(self, slots: npt.NDArray[np.integer]) -> None:
        """Raise SlotAccountingError if one of these slots [n] is free."""
        if len(slots) and not self._references[slots].all():
            raise SlotAccountingError(f"{np.count_nonzero(self._references[slots] == 0)} slots are owned and free")

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless free extents are the longest runs of unreferenced slots, in all tables."""
        runs = {start: stop - start for start, stop in _runs(self._references == 0)}
        before = {start + length: start for start, length in self._length_at.items()}
        by_length = {start: length for length in self._lengths for start in self._starts_of[length]}
        if not runs == self._length_at == by_length or before != self._start_before or self.free != sum(runs.values()):
            raise SlotAccountingError(
                f"{sum(self._length_at.values())} slots in {len(self._length_at)} free extents, "
                f"{sum(runs.values())} unreferenced in {len(runs)}, {self.free} counted as free"
            )

    def _held(self, extent: Extent) -> npt.NDArray[np.int32]:
        """The reference counts of an extent, all positive."""
        if extent.length <= 0 or extent.start < 0 or extent.stop > self.num_slots:
            raise ValueError(f"slots [{extent.start}, {extent.stop}) are not within [0, {self.num_slots})")
        references = self._references[extent.start : extent.stop]
        if references.min() < 1:
            slot = extent.start + int(np.argmin(references))
            raise SlotAccountingError(f"slot {slot} is free, but was released or retained as if it were held")
        return references

    def _give(self, extent: Extent) -> None:
        """Make unreferenced slots free, joined with their free neighbours."""
        self.free += extent.length
        start, stop = extent.start, extent.stop
        if stop in self._length_at:
            stop += self._remove(stop)
        if start in self._start_before:
            start -= self._remove(self._start_before[start])
        self._insert(Extent(start, stop - start))

    def _insert(self, extent: Extent) -> None:
        self._length_at[extent.start] = extent.length
        self._start_before[extent.stop] = extent.start
        if extent.length not in self._starts_of:
            insort(self._lengths, extent.length)
            self._starts_of[extent.length] = OrderedDict()
        self._starts_of[extent.length][extent.start] = None

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length], self._starts_of[length][start]
        if not self._starts_of[length]:
            del self._starts_of[length], self._lengths[bisect_left(self._lengths, length)]
        return length


def _runs(marked: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where runs of marked entries begin and end."""
    framed = np.zeros(len(marked) + 2, dtype=np.bool_)
    framed[1:-1] = marked
    edges = np.flatnonzero(framed[1:] != framed[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
