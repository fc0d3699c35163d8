"""The device tier: hot slots, index pages, and one row of tables per running request."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hisparse.extents import Extent, SlotAccountingError, SlotAllocator, expand
from hisparse.layout import KVLayout

_GROWTH = 64
"""Hot slots are taken this many at a time, so that a short request does not go to the allocator for every token."""


def hot_granule(device_buffer_size: int) -> int:
    """Consecutive slots that a row owns at a time, a power of two: what rounding up may cost is 1/256 of a buffer.

    So a row's hot slots are known by at most 512 numbers, which a kernel can hold at hand.
    """
    return 1 << max(0, (device_buffer_size // 256).bit_length() - 1)


@dataclass
class _Row:
    """What a running request owns."""

    granules: list[Extent] = field(default_factory=list)
    num_granules: int = 0
    pages: list[Extent] = field(default_factory=list)
    num_pages: int = 0


class DeviceKVPool:
    """Hot slots and index pages in device memory, and the tables by which a kernel finds them.

    kv: uint8 [num_layers, num_slots, item_bytes]. index_keys: uint8 [num_index_layers, num_index_pages,
    index_page_size, index_key_bytes].

    A running request has a row. Per row, int64 on the device:
    hot_granules [max_requests, ceil((device_buffer_size + 1) / hot_granule)]: hot index // hot_granule -> the first of
    as many slots of `kv`, -1 if not owned yet. Hot index device_buffer_size is the extra one for the newest token of a
    request that outgrew the buffer.
    page_table [max_requests, max_pages]: page of the sequence -> page of `index_keys`, 0 if not owned yet.
    host_slot_of [max_requests, max_context]: position -> slot of the host pool, -1 if there is none yet.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        num_index_pages: int,
        index_page_size: int,
        max_requests: int,
        max_context: int,
        device_buffer_size: int,
        device: torch.device | str,
    ) -> None:
        self.layout = layout
        self.index_page_size = index_page_size
        self.max_requests = max_requests
        self.max_context = max_context
        self.device_buffer_size = device_buffer_size
        self.hot_granule = hot_granule(device_buffer_size)
        self.device = torch.device(device)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=self.device)

        def table(width: int, fill: int) -> torch.Tensor:
            return torch.full((max_requests, width), fill, dtype=torch.int64, device=self.device)

        self.kv = zeros(layout.num_layers, num_slots, layout.item_bytes)
        self.index_keys = zeros(layout.num_index_layers, num_index_pages, index_page_size, layout.index_key_bytes)
        self.hot_granules = table(self._granules_for(device_buffer_size + 1), -1)
        self.page_table = table(self._pages_for(max_context), 0)
        self.host_slot_of = table(max_context, -1)
        self._granules = SlotAllocator(num_slots // self.hot_granule)
        self._pages = SlotAllocator(num_index_pages)
        self._free_rows = list(reversed(range(max_requests)))
        self._rows: dict[int, _Row] = {}

    @property
    def free_slots(self) -> int:
        return self._granules.free * self.hot_granule

    @property
    def used_slots(self) -> int:
        return self._granules.used * self.hot_granule

    @property
    def free_index_pages(self) -> int:
        return self._pages.free

    @property
    def used_index_pages(self) -> int:
        return self._pages.used

    @property
    def used_rows(self) -> int:
        return len(self._rows)

    def alloc_logical_only(self, num_tokens: int) -> int | None:
        """Reserve a row and index pages for `num_tokens` positions, but no hot slots.

        Returns the row, or None (nothing taken) if there is no row or not enough pages.
        """
        self._check_context(num_tokens)
        if not self._free_rows or self._pages.free < self._pages_for(num_tokens):
            return None
        row = self._free_rows.pop()
        self._rows[row] = _Row()
        self._grow_pages(row, self._pages_for(num_tokens))
        return row

    def grow(self, row: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all: index pages for each, hot slots up to the buffer and one extra.

        False (nothing taken) if there is not enough of both. True at once if the room is there.
        """
        self._check_context(num_tokens)
        owned = self._rows[row]
        pages, granules = self._pages_for(num_tokens), self._granules_for(num_tokens)
        if self._pages.free < pages - owned.num_pages or self._granules.free < granules - owned.num_granules:
            return False
        self._grow_pages(row, pages)
        self._grow_hot(row, granules)
        return True

    def slots_for(self, num_tokens: int) -> int:
        """Hot slots that a request of so many tokens needs."""
        return self._granules_for(num_tokens) * self.hot_granule

    def growth_reserve(self) -> int:
        """Hot slots that the running requests will soon want: those of a growth, or what is left to a full buffer."""
        full = self.hot_granules.shape[1]
        growing = (min(self._growth, full - row.num_granules) for row in self._rows.values())
        return sum(growing) * self.hot_granule

    def hot_slots(self, rows: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
        """Slots of `kv` at hot indices, -1 if not owned. rows, hot: int64 that broadcast, on the device."""
        first = self.hot_granules[rows, hot // self.hot_granule]
        return torch.where(first >= 0, first + hot % self.hot_granule, -1)

    def first_hot_slots(self, row: int, num_tokens: int) -> torch.Tensor:
        """Slots of `kv` at a row's first hot indices: int64 [num_tokens]."""
        granules = self.hot_granules[row, : self._granules_for(num_tokens), None]
        return (granules + torch.arange(self.hot_granule, device=self.device)).flatten()[:num_tokens]

    def has_room(self, row: int, num_tokens: int) -> bool:
        """Whether the row owns what `grow` would give it."""
        owned = self._rows[row]
        pages, granules = self._pages_for(num_tokens), self._granules_for(num_tokens)
        return owned.num_pages >= pages and owned.num_granules >= granules

    def free_row(self, row: int) -> None:
        """Give back the row with its hot slots and index pages."""
        owned = self._rows.pop(row)
        self._granules.release(owned.granules)
        self._pages.release(owned.pages)
        self.hot_granules[row] = -1
        self.page_table[row] = 0
        self.host_slot_of[row] = -1
        self._free_rows.append(row)

    def set_host_slots(self, row: int, start: int, slots: npt.NDArray[np.int64]) -> None:
        """Record that the positions from `start` on live in these host slots."""
        stop = min(start + len(slots), self.max_context)
        self.host_slot_of[row, start:stop] = self.upload(slots[: stop - start])

    def index_rows(self, row: int, num_tokens: int) -> torch.Tensor:
        """Where a row's first index keys lie in `index_keys.flatten(1, 2)`: int64 [num_tokens]."""
        positions = torch.arange(num_tokens, device=self.device)
        pages = self.page_table[row, positions // self.index_page_size]
        return pages * self.index_page_size + positions % self.index_page_size

    def upload(self, values: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """The values as int64 on the device, in the order of its work and without waiting for it."""
        tensor = torch.as_tensor(values, dtype=torch.int64)
        if self.device.type == "cuda":  # a copy from memory that is not pinned waits until the device has come to it
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless what rows own is exactly what is used, each slot and page once."""
        self._granules.check_integrity()
        self._pages.check_integrity()
        rows = self._rows.values()
        _check_owned("granules", self._granules, [extent for row in rows for extent in row.granules])
        _check_owned("index pages", self._pages, [extent for row in rows for extent in row.pages])
        if sorted([*self._free_rows, *self._rows]) != list(range(self.max_requests)):
            raise SlotAccountingError(f"rows used {sorted(self._rows)}, free {sorted(self._free_rows)}")

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.index_page_size)

    def _granules_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.device_buffer_size + 1) // self.hot_granule)

    @property
    def _growth(self) -> int:
        """In granules."""
        return max(1, _GROWTH // self.hot_granule)

    def _check_context(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.max_context:
            raise ValueError(f"{num_tokens} tokens asked for, a request may have up to {self.max_context}")

    def _grow_pages(self, row: int, num_pages: int) -> None:
        owned = self._rows[row]
        if num_pages <= owned.num_pages:
            return
        extents = _take(self._pages, num_pages - owned.num_pages)
        self.page_table[row, owned.num_pages : num_pages] = self.upload(expand(extents))
        owned.pages += extents
        owned.num_pages = num_pages

    def _grow_hot(self, row: int, num_granules: int) -> None:
        """Own at least `num_granules`, which are there, and up to a growth of them if there are more."""
        owned = self._rows[row]
        if num_granules <= owned.num_granules:
            return
        grown = min(-(-num_granules // self._growth) * self._growth, self.hot_granules.shape[1])
        extents = _take(self._granules, min(grown - owned.num_granules, self._granules.free))
        granules = expand(extents)
        stop = owned.num_granules + len(granules)
        self.hot_granules[row, owned.num_granules : stop] = self.upload(granules * self.hot_granule)
        owned.granules += extents
        owned.num_granules = stop


def _take(allocator: SlotAllocator, count: int) -> tuple[Extent, ...]:
    """Allocate what was checked to be there."""
    extents = allocator.allocate(count)
    if extents is None:
        raise SlotAccountingError(f"{count} slots wanted, {allocator.free} free, although that was checked before")
    return extents


def _check_owned(what: str, allocator: SlotAllocator, owned: list[Extent]) -> None:
    slots = expand(owned)
    if len(set(slots.tolist())) != len(slots) or len(slots) != allocator.used:
        raise SlotAccountingError(f"rows own {len(slots)} {what}, {allocator.used} are used")
