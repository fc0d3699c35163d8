"""This project's allocator and two plain ones, with the same face."""

from bisect import bisect_left, insort
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hisparse.extents import HostSlots, SlotAllocator


class Allocator(Protocol):
    """Slots are handed out as a holding, which the caller keeps and gives back. None of them can run out here."""

    def reserve(self, count: int) -> Any: ...

    def grow(self, holding: Any, count: int) -> Any:
        """The holding with more slots behind it."""
        ...

    def release(self, holding: Any) -> None: ...

    @staticmethod
    def extents(holding: Any) -> int:
        """In how many pieces of neighbouring, ascending slots the holding lies."""
        ...


class Ours:
    """`hisparse.extents`: free extents are joined with their neighbours; best fit, else the largest first."""

    def __init__(self, num_slots: int) -> None:
        self._slots = SlotAllocator(num_slots)

    def reserve(self, count: int) -> HostSlots:
        extents = self._slots.allocate(count)
        assert extents is not None
        return HostSlots(extents)

    def grow(self, holding: HostSlots, count: int) -> HostSlots:
        extents = self._slots.allocate(count)
        assert extents is not None
        return holding.extend(extents)

    def release(self, holding: HostSlots) -> None:
        self._slots.release(holding.extents)

    @staticmethod
    def extents(holding: HostSlots) -> int:
        return len(holding.extents)


class SlotStack:
    """A free list of single slots: those given back last are handed out first, in the order in which they were held."""

    def __init__(self, num_slots: int) -> None:
        self._free: NDArray[np.int64] = np.arange(num_slots, dtype=np.int64)[::-1].copy()
        self._top = num_slots

    def reserve(self, count: int) -> NDArray[np.int64]:
        self._top -= count
        return self._free[self._top : self._top + count][::-1].copy()

    def grow(self, holding: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return np.concatenate((holding, self.reserve(count)))

    def release(self, holding: NDArray[np.int64]) -> None:
        self._free[self._top : self._top + len(holding)] = holding[::-1]
        self._top += len(holding)

    @staticmethod
    def extents(holding: NDArray[np.int64]) -> int:
        return 1 + int(np.count_nonzero(np.diff(holding) != 1))


class FirstFit:
    """Free extents in the order of addresses: the first that is big enough, else one after the other from the front."""

    def __init__(self, num_slots: int) -> None:
        self._starts = [0]
        self._lengths = {0: num_slots}

    def reserve(self, count: int) -> list[tuple[int, int]]:
        fit = next((start for start in self._starts if self._lengths[start] >= count), None)
        taken = []
        while count:
            start = self._starts[0] if fit is None else fit
            length = min(count, self._lengths[start])
            taken.append((start, length))
            self._cut(start, length)
            count -= length
        return taken

    def grow(self, holding: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
        joined = list(holding)
        for start, length in self.reserve(count):
            if joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        return joined

    def release(self, holding: list[tuple[int, int]]) -> None:
        for start, length in holding:
            after = bisect_left(self._starts, start)
            if after < len(self._starts) and self._starts[after] == start + length:
                length += self._lengths.pop(self._starts.pop(after))
            if after > 0 and (before := self._starts[after - 1]) + self._lengths[before] == start:
                self._lengths[before] += length
            else:
                insort(self._starts, start)
                self._lengths[start] = length

    @staticmethod
    def extents(holding: list[tuple[int, int]]) -> int:
        return len(holding)

    def _cut(self, start: int, length: int) -> None:
        """Take the first slots of a free extent."""
        position = bisect_left(self._starts, start)
        rest = self._lengths.pop(start) - length
        if rest:
            self._starts[position] = start + length
            self._lengths[start + length] = rest
        else:
            del self._starts[position]


ALLOCATORS: dict[str, type[Ours] | type[SlotStack] | type[FirstFit]] = {
    "ours": Ours,
    "first fit": FirstFit,
    "stack of slots": SlotStack,
}
