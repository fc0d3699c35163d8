"""Slabs: device memory that is hot slots for some rows and index pages for others, as they need it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from math import lcm

import numpy as np
import numpy.typing as npt
import torch

from base.device import upload
from kernels.swap_in import hot_granule
from kvcache.extents import Extent, HostSlots, SlotAccountingError, SlotAllocator, expand
from kvcache.layout import KVLayout

_WASTED = 100
"""A slab leaves at most one of so many bytes unused."""


@dataclass(frozen=True)
class SlabLayout:
    """How a slab of device memory is divided: into hot slots of all layers, or into index pages of all index layers.

    A slab holds the items of `slots` slots layer after layer, or `pages` pages index layer after index layer. Its size
    is a multiple of an item's and of a page's, so that slots and pages have numbers that are the same in all layers and
    in all slabs say where they begin: those of a slab come `slot_stride` and `page_stride` after those of the slab
    before. Numbers between are not used.

    index_page_size: tokens. granule: slots; `slots` is a multiple of it.
    """

    layout: KVLayout
    index_page_size: int
    granule: int

    @classmethod
    def of(cls, layout: KVLayout, index_page_size: int, device_buffer_size: int) -> "SlabLayout":
        """With the granules that the swap-in kernel has for hot buffers of that size."""
        return cls(layout, index_page_size, hot_granule(device_buffer_size))

    @cached_property
    def num_bytes(self) -> int:
        return _slab_bytes(self._granule_bytes, self._all_pages_bytes, lcm(self.layout.item_bytes, self._page_bytes))

    @property
    def slots(self) -> int:
        """Hot slots of a slab."""
        return self.num_bytes // self._granule_bytes * self.granule

    @property
    def pages(self) -> int:
        """Index pages of a slab."""
        return self.num_bytes // self._all_pages_bytes

    @property
    def page_tokens(self) -> int:
        """Tokens whose index keys a slab holds."""
        return self.pages * self.index_page_size

    @property
    def slot_stride(self) -> int:
        return self.num_bytes // self.layout.item_bytes

    @property
    def page_stride(self) -> int:
        return self.num_bytes // self._page_bytes

    def for_slots(self, slots: int) -> int:
        """Slabs that hold as many hot slots."""
        return -(-slots // self.slots)

    def for_pages(self, num_tokens: int) -> int:
        """Slabs that hold the index keys of as many tokens."""
        return -(-num_tokens // self.page_tokens)

    def items(self, memory: torch.Tensor) -> torch.Tensor:
        """Memory as slots: uint8 [num_slabs * num_bytes] as uint8 [num_layers, numbers, item_bytes]."""
        size, layers = self.layout.item_bytes, self.layout.num_layers
        numbers = len(memory) // size - self.slot_stride + self.slots
        return memory.as_strided((layers, numbers, size), (self.slots * size, size, 1))

    def index_keys(self, memory: torch.Tensor) -> torch.Tensor:
        """Memory as pages: uint8 [num_index_layers, numbers, index_page_size, index_key_bytes]."""
        size, key, layers = self._page_bytes, self.layout.index_key_bytes, self.layout.num_index_layers
        numbers = len(memory) // size - self.page_stride + self.pages
        return memory.as_strided((layers, numbers, self.index_page_size, key), (self.pages * size, size, key, 1))

    @property
    def _page_bytes(self) -> int:
        """Of a page of one index layer."""
        return self.index_page_size * self.layout.index_key_bytes

    @property
    def _all_pages_bytes(self) -> int:
        return self.layout.num_index_layers * self._page_bytes

    @property
    def _granule_bytes(self) -> int:
        """In all layers."""
        return self.granule * self.layout.num_layers * self.layout.item_bytes


@cache
def _slab_bytes(granule_bytes: int, page_bytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that granules fill, and pages too, but for a part in `_WASTED`."""
    sizes = count(unit * -(-max(granule_bytes, page_bytes) // unit), unit)
    return next(size for size in sizes if max(size % granule_bytes, size % page_bytes) * _WASTED <= size)


class OwnedSlabs:
    """Slabs that rows own for one of both uses, and the device table that says where their parts are.

    table: int64 [rows, width] on the device. A row's entries are the parts of its slabs, in their order, `vacant` where
    it owns none. parts: int64 [n], those of slab 0; slab s has them `s * stride` further on. counts: slabs of each row.
    most: slabs that all rows together may own; None: all that the allocator has.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        table: torch.Tensor,
        vacant: int,
        parts: npt.NDArray[np.int64],
        stride: int,
        most: int | None = None,
    ) -> None:
        self.counts: defaultdict[int, int] = defaultdict(int)
        self._allocator = allocator
        self._most = allocator.num_slots if most is None else most
        self._used = 0
        self._table = table.fill_(vacant)
        self._vacant = vacant
        self._parts = parts
        self._stride = stride
        self._extents: defaultdict[int, list[Extent]] = defaultdict(list)

    @property
    def used(self) -> int:
        """Slabs that rows own, and those that were taken for some."""
        return self._used

    @property
    def free(self) -> int:
        """Slabs that rows may still get."""
        return min(self._allocator.free, self._most - self._used)

    def lacks(self, row: int, count: int) -> int:
        """Slabs that `grow` takes."""
        return max(0, count - self.counts[row])

    def grow(self, row: int, count: int) -> None:
        """Have the row own `count` slabs, if it owns fewer. The caller has asked whether as many are free."""
        if lacking := self.lacks(row, count):
            extents = self.take(lacking)
            assert extents is not None, "as many are free"
            self._write(row, self.counts[row], extents)
            self._extents[row] += extents
            self.counts[row] = count

    def take(self, count: int) -> tuple[Extent, ...] | None:
        """Take slabs for a row that is to own them later (`replace`), or None if fewer are free."""
        extents = self._allocator.allocate(count) if count <= self.free else None
        self._used += 0 if extents is None else count
        return extents

    def drop(self, extents: Sequence[Extent]) -> None:
        """Give back what `take` returned."""
        self._used -= sum(extent.length for extent in extents)
        self._allocator.release(extents)

    def replace(self, row: int, extents: Sequence[Extent]) -> None:
        """Have the row own these slabs, which are taken already, in place of its own."""
        self.release(row)
        self._write(row, 0, extents)
        self._extents[row] = list(extents)
        self.counts[row] = sum(extent.length for extent in extents)

    def keep(self, row: int, first: int, count: int) -> None:
        """Have the row own only `count` of its slabs, from number `first` on, which becomes its first."""
        head, tail = HostSlots(tuple(self._extents[row])).cut(first)
        kept, rest = HostSlots(tail).cut(count)
        self.drop((*head, *rest))
        self._table[row] = self._vacant
        self._write(row, 0, kept)
        self._extents[row] = list(kept)
        self.counts[row] = count

    def release(self, row: int) -> None:
        self.drop(self._extents.pop(row, []))
        self.counts.pop(row, None)
        self._table[row] = self._vacant

    def owned(self) -> list[Extent]:
        """All that rows own."""
        return [extent for extents in self._extents.values() for extent in extents]

    def locations(self, extents: Iterable[Extent]) -> npt.NDArray[np.int64]:
        """The parts of slabs, int64 [slabs * n], as the table has them."""
        return (expand(extents)[:, None] * self._stride + self._parts).flatten()

    def _write(self, row: int, first: int, extents: Sequence[Extent]) -> None:
        """To the table, from the row's slab number `first` on."""
        parts = self.locations(extents)
        at = first * len(self._parts)
        upload(parts, self._table[row, at : at + len(parts)])


def check_owners(allocator: SlotAllocator, extents: Iterable[Extent]) -> None:
    """Raise SlotAccountingError unless these slabs are exactly the used ones, each once."""
    allocator.check_integrity()
    owned = expand(extents)
    if len(set(owned.tolist())) != len(owned) or len(owned) != allocator.used:
        raise SlotAccountingError(f"rows own {len(owned)} slabs, {allocator.used} are used")
