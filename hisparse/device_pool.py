"""The device tier: hot slots, index pages, and one row of tables per running request."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.swap_in import hot_granule
from kvcache.extents import Extent, HostSlots, SlotAccountingError, SlotAllocator, expand
from kvcache.layout import KVLayout

_GROWTH = 64
"""Hot slots are taken this many at a time, so that a short request does not go to the allocator for every token."""


def upload(values: Sequence[int] | npt.NDArray[Any], into: torch.Tensor) -> torch.Tensor:
    """Copy values to a tensor on a device, in the order of its work, without waiting. Returns the tensor."""
    tensor = torch.as_tensor(values)
    if into.is_cuda:  # a copy from memory that is not pinned waits until the device has come to it
        tensor = tensor.pin_memory()
    return into.copy_(tensor, non_blocking=True)


class _OwnedSlots:
    """Slots that rows own, and the device table that says which.

    table: int64 [rows, width] on the device. Entry i of a row is `unit` times the i-th slot that the row owns, `vacant`
    if it owns fewer. counts: how many slots each row owns.
    """

    def __init__(self, num_slots: int, table: torch.Tensor, vacant: int, unit: int = 1) -> None:
        self.allocator = SlotAllocator(num_slots)
        self.counts: defaultdict[int, int] = defaultdict(int)
        self._table = table.fill_(vacant)
        self._vacant = vacant
        self._unit = unit
        self._extents: defaultdict[int, list[Extent]] = defaultdict(list)

    def can_grow(self, row: int, count: int) -> bool:
        """Whether `grow` finds enough free slots."""
        return count - self.counts[row] <= self.allocator.free

    def grow(self, row: int, count: int) -> None:
        """Have the row own `count` slots, if it owns fewer."""
        owned = self.counts[row]
        if count <= owned:
            return
        extents = self.allocator.allocate(count - owned)
        assert extents is not None, "can_grow was asked before"
        upload(expand(extents) * self._unit, self._table[row, owned:count])
        self._extents[row] += extents
        self.counts[row] = count

    def replace(self, row: int, extents: Sequence[Extent]) -> None:
        """Have the row own these slots, which are taken already, in place of its own."""
        self.release(row)
        slots = expand(extents)
        upload(slots * self._unit, self._table[row, : len(slots)])
        self._extents[row] = list(extents)
        self.counts[row] = len(slots)

    def keep(self, row: int, first: int, count: int) -> None:
        """Have the row own only `count` of its slots, from number `first` on, which becomes its first."""
        _, tail = HostSlots(tuple(self._extents[row])).cut(first)
        kept, _ = HostSlots(tail).cut(count)
        self.allocator.retain(kept)
        self.replace(row, kept)

    def release(self, row: int) -> None:
        self.allocator.release(self._extents.pop(row, []))
        self.counts.pop(row, None)
        self._table[row] = self._vacant

    def check_integrity(self, what: str, others: Iterable[Extent] = ()) -> None:
        """Raise SlotAccountingError unless rows and `others` own exactly the used slots, each once."""
        self.allocator.check_integrity()
        owned = expand([*others, *(extent for extents in self._extents.values() for extent in extents)])
        if len(set(owned.tolist())) != len(owned) or len(owned) != self.allocator.used:
            raise SlotAccountingError(f"rows own {len(owned)} {what}, {self.allocator.used} are used")


class DeviceKVPool:
    """Hot slots and index pages in device memory, and the tables by which a kernel finds them.

    kv: uint8 [num_layers, num_slots, item_bytes]. index_keys: uint8 [num_index_layers, num_index_pages,
    index_page_size, index_key_bytes].

    A running request has a row. A *resident* row has every position at the hot index of its number, and owns hot slots
    for as many positions as it has room for. Any other row owns at most `device_buffer_size` hot slots and a window,
    and `hisparse.residency` says what they hold. Per row, int64 on the device:
    hot_granules [max_requests, granules]: hot index // hot_granule -> the first of as many slots of `kv`, -1 if not
    owned. In a row that is not resident, hot indices from device_buffer_size on are for the tokens that a step computes
    of a request that outgrew the buffer.
    identity [max_requests]: I of `hisparse.residency`.
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
        window: int = 1,
    ) -> None:
        self.index_page_size = index_page_size
        self.max_requests = max_requests
        self.max_context = max_context
        self.device_buffer_size = device_buffer_size
        self.window = window
        self.hot_granule = hot_granule(device_buffer_size)
        self.device = torch.device(device)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=self.device)

        def table(width: int) -> torch.Tensor:
            return torch.full((max_requests, width), -1, dtype=torch.int64, device=self.device)

        self.kv = zeros(layout.num_layers, num_slots, layout.item_bytes)
        self.index_keys = zeros(layout.num_index_layers, num_index_pages, index_page_size, layout.index_key_bytes)
        self.buffer_granules = -(-(device_buffer_size + window) // self.hot_granule)
        """Of a row that is long."""
        self.hot_granules = table(max(self.buffer_granules, self.granules_of(max_context)))
        self.identity = torch.full((max_requests,), device_buffer_size, dtype=torch.int64, device=self.device)
        self.page_table = table(self._pages_for(max_context))
        self.host_slot_of = table(max_context)
        self._granules = _OwnedSlots(num_slots // self.hot_granule, self.hot_granules, -1, unit=self.hot_granule)
        self._pages = _OwnedSlots(num_index_pages, self.page_table, 0)
        self._growth = max(1, _GROWTH // self.hot_granule)
        """In granules."""
        self._free_rows = list(reversed(range(max_requests)))
        self._used_rows: set[int] = set()
        self._resident: set[int] = set()
        self._loose: list[tuple[Extent, ...]] = []
        """Granules that were taken for rows that do not own them yet."""

    @property
    def free_slots(self) -> int:
        return self._granules.allocator.free * self.hot_granule

    @property
    def used_slots(self) -> int:
        return self._granules.allocator.used * self.hot_granule

    @property
    def usage(self) -> float:
        """The part of all hot slots that rows own, from 0 to 1."""
        allocator = self._granules.allocator
        return allocator.used / max(1, allocator.used + allocator.free)

    def has_row(self, num_tokens: int) -> bool:
        """Whether there are a row and index pages for a request of `num_tokens` tokens."""
        return bool(self._free_rows) and self.has_pages(self._free_rows[-1], num_tokens)

    @property
    def used_rows(self) -> int:
        return len(self._used_rows)

    def allocate_row(self, num_tokens: int) -> int | None:
        """Take a row with room for `num_tokens` tokens (see `grow`), or None (nothing taken) if something is short."""
        if not self._free_rows or not self.grow(self._free_rows[-1], num_tokens):
            return None
        row = self._free_rows.pop()
        self._used_rows.add(row)
        return row

    def grow(self, row: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all, of which the last may begin a window: index pages for each, and hot
        slots for each as long as the row is short with all of them, else the whole buffer and the window.

        False (nothing taken) if there is not enough of both. True at once if the room is there. Raises ValueError
        beyond the context.
        """
        if not 0 <= num_tokens <= self.max_context:
            raise ValueError(f"{num_tokens} tokens asked for, a request may have up to {self.max_context}")
        if not self.has_pages(row, num_tokens):
            return False
        granules = self.granules_of(num_tokens) if row in self._resident else self._granules_for(num_tokens)
        if not self._granules.can_grow(row, granules):
            return False
        self._pages.grow(row, self._pages_for(num_tokens))
        owned = self._granules.counts[row]
        if granules > owned:
            most = self.hot_granules.shape[1] if row in self._resident else self.buffer_granules
            grown = min(-(-granules // self._growth) * self._growth, most)
            self._granules.grow(row, min(grown, owned + self._granules.allocator.free))
        return True

    def has_pages(self, row: int, num_tokens: int) -> bool:
        """Whether there are index pages for `num_tokens` tokens of a row."""
        return self._pages.can_grow(row, self._pages_for(num_tokens))

    def room(self, row: int) -> int:
        """For how many tokens a row has index pages and hot slots."""
        granules = self._granules.counts[row]
        hot = granules * self.hot_granule
        if row not in self._resident:
            short = min(hot, self.device_buffer_size + 1 - self.window)
            hot = self.max_context if granules == self.buffer_granules else short
        return min(hot, self._pages.counts[row] * self.index_page_size, self.max_context)

    # Resident rows

    def is_resident(self, row: int) -> bool:
        return row in self._resident

    @property
    def resident_rows(self) -> int:
        return len(self._resident)

    def spare(self, row: int) -> int:
        """Granules that a row gives back when it ceases to be resident."""
        return max(0, self._granules.counts[row] - self.buffer_granules) if row in self._resident else 0

    @property
    def reclaimable_slots(self) -> int:
        """Hot slots that come back under pressure, from resident rows and from those that are being made resident."""
        return sum(map(self.spare, self._resident)) * self.hot_granule + self.loose_slots

    @property
    def loose_slots(self) -> int:
        """Hot slots that were taken for rows that do not own them yet. Any thread may ask."""
        return sum(extent.length for taken in list(self._loose) for extent in taken) * self.hot_granule

    @property
    def resident_slots(self) -> int:
        """Hot slots that resident rows own. Any thread may ask."""
        return sum(self._granules.counts.get(row, 0) for row in list(self._resident)) * self.hot_granule

    @property
    def free_granules(self) -> int:
        return self._granules.allocator.free

    def take(self, granules: int) -> tuple[Extent, ...] | None:
        """Take granules for a row that shall become resident, or None if fewer are free."""
        taken = self._granules.allocator.allocate(granules)
        if taken is not None:
            self._loose.append(taken)
        return taken

    def drop(self, taken: tuple[Extent, ...]) -> None:
        """Give back what `take` returned."""
        self._loose.remove(taken)
        self._granules.allocator.release(taken)

    def make_resident(self, row: int, taken: tuple[Extent, ...] | None = None) -> None:
        """A row becomes resident. taken: granules of `take`, which hold its positions in order, in place of its own;
        None for a short row, whose own ones do."""
        if taken is not None:
            self._loose.remove(taken)
            self._granules.replace(row, taken)
        self._resident.add(row)
        self.identity[row] = self.max_context + self.window

    def can_make_long(self, row: int) -> bool:
        """Whether a row has the granules of a long one, or finds them."""
        return self._granules.can_grow(row, self.buffer_granules)

    def make_long(self, row: int, num_tokens: int) -> int:
        """Make a resident row a long one, which keeps the granules of its newest tokens. Returns the position that is
        at hot index 0 then."""
        wanted = self.granules_of(max(0, num_tokens - self.device_buffer_size))
        first = min(wanted, self.spare(row))
        if self.spare(row):
            self._granules.keep(row, first, self.buffer_granules)
        else:
            self._granules.grow(row, self.buffer_granules)
        self._resident.remove(row)
        self.identity[row] = self.device_buffer_size
        return first * self.hot_granule

    def slots_for(self, num_tokens: int) -> int:
        """Hot slots that a request of `num_tokens` tokens needs."""
        return self._granules_for(num_tokens) * self.hot_granule

    def growth_reserve(self) -> int:
        """Hot slots that the running requests will take next: one growth each, less where the buffer is nearly full."""
        full = self.buffer_granules
        growing = (min(self._growth, max(0, full - self._granules.counts[row])) for row in self._used_rows)
        return sum(growing) * self.hot_granule

    def hot_slots(self, rows: torch.Tensor | int, hot: torch.Tensor) -> torch.Tensor:
        """Slots of `kv` at hot indices, -1 if not owned. rows, hot: int64 that broadcast, on the device."""
        first = self.hot_granules[rows, hot // self.hot_granule]
        return torch.where(first >= 0, first + hot % self.hot_granule, -1)

    def window_hot(self, rows: torch.Tensor, newest: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hot indices of positions in the window that begins at `newest`; of positions before it, any of the row's.

        rows, newest, positions: int64 that broadcast, on the device, at least 0 but for `newest`.
        """
        is_short = newest + self.window <= self.identity[rows]
        return torch.where(is_short, positions, (positions - newest).clamp(min=0) + self.device_buffer_size)

    def index_rows(self, rows: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        """Places of index keys in `index_keys.flatten(1, 2)`. rows, positions: int64 that broadcast, on the device."""
        pages = self.page_table[rows, positions // self.index_page_size]
        return pages * self.index_page_size + positions % self.index_page_size

    def set_host_slots(self, row: int, start: int, slots: npt.NDArray[np.int64]) -> None:
        """Record that the positions from `start` on live in these host slots."""
        stop = min(start + len(slots), self.max_context)
        upload(slots[: stop - start], self.host_slot_of[row, start:stop])

    def free_row(self, row: int) -> None:
        """Give back the row with its hot slots and index pages."""
        self._used_rows.remove(row)
        self._granules.release(row)
        self._pages.release(row)
        if row in self._resident:
            self._resident.remove(row)
            self.identity[row] = self.device_buffer_size
        self.host_slot_of[row] = -1
        self._free_rows.append(row)

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless what rows own is exactly what is used, each slot and page once."""
        self._granules.check_integrity("granules", [extent for taken in self._loose for extent in taken])
        self._pages.check_integrity("index pages")
        if sorted([*self._free_rows, *self._used_rows]) != list(range(self.max_requests)):
            raise SlotAccountingError(f"rows used {sorted(self._used_rows)}, free {sorted(self._free_rows)}")

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.index_page_size)

    def granules_of(self, num_tokens: int) -> int:
        """Granules that hold as many tokens."""
        return -(-num_tokens // self.hot_granule)

    def _granules_for(self, num_tokens: int) -> int:
        is_short = num_tokens - 1 + self.window <= self.device_buffer_size
        return self.granules_of(num_tokens) if is_short else self.buffer_granules
