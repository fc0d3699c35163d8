"""The device tier: slabs of hot slots and index pages, and one row of tables per running request."""

import numpy as np
import numpy.typing as npt
import torch

from base.device import upload
from hisparse.slabs import OwnedSlabs, SlabLayout, check_owners
from kvcache.extents import Extent, SlotAccountingError, SlotAllocator
from kvcache.layout import KVLayout


class DeviceKVPool:
    """Hot slots and index pages in device memory, and the tables by which a kernel finds them.

    Both are views of `memory`, which is divided into slabs (`SlabLayout`): kv, uint8 [num_layers, slots,
    item_bytes], and index_keys, uint8 [num_index_layers, pages, index_page_size, index_key_bytes].

    A running request has a row. A *resident* row has every position at the hot index of its number, and owns hot slots
    for as many positions as it has room for. Any other row owns at most `device_buffer_size` hot slots and a window,
    in whole slabs, and `hisparse.residency` says what they hold. Per row, int64 on the device:
    hot_granules [max_requests, granules]: hot index // hot_granule -> the first of as many slots of `kv`, -1 if not
    owned. In a row that is not resident, hot indices from device_buffer_size on are for the tokens that a step computes
    of a request that outgrew the buffer.
    identity [max_requests]: I of `hisparse.residency`.
    page_table [max_requests, max_pages]: page of the sequence -> page of `index_keys`, 0 if not owned yet.
    host_slot_of [max_requests, max_context]: position -> slot of the host pool, -1 if there is none yet.

    max_hot_slabs: slabs that may be hot slots at a time; all if None.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_slabs: int,
        index_page_size: int,
        max_requests: int,
        max_context: int,
        device_buffer_size: int,
        device: torch.device | str,
        window: int = 1,
        max_hot_slabs: int | None = None,
    ) -> None:
        self.index_page_size = index_page_size
        self.max_requests = max_requests
        self.max_context = max_context
        self.device_buffer_size = device_buffer_size
        self.window = window
        self.device = torch.device(device)
        self.slab = SlabLayout.of(layout, index_page_size, device_buffer_size)
        self.hot_granule = self.slab.granule
        self.memory = torch.zeros(num_slabs * self.slab.num_bytes, dtype=torch.uint8, device=self.device)
        self.kv, self.index_keys = self.slab.items(self.memory), self.slab.index_keys(self.memory)

        def table(width: int) -> torch.Tensor:
            return torch.full((max_requests, width), -1, dtype=torch.int64, device=self.device)

        self.buffer_slabs = self.slab.for_slots(device_buffer_size + window)
        """Of a row that is long."""
        granules, pages = np.arange(0, self.slab.slots, self.hot_granule), np.arange(self.slab.pages)
        most_hot = max(self.buffer_slabs, self.slab.for_slots(max_context))
        self.hot_granules = table(most_hot * len(granules))
        self.identity = torch.full((max_requests,), device_buffer_size, dtype=torch.int64, device=self.device)
        self.page_table = table(self.slab.for_pages(max_context) * len(pages))
        self.host_slot_of = table(max_context)
        self._slabs = SlotAllocator(num_slabs)
        self._hot = OwnedSlabs(self._slabs, self.hot_granules, -1, granules, self.slab.slot_stride, max_hot_slabs)
        self._pages = OwnedSlabs(self._slabs, self.page_table, 0, pages, self.slab.page_stride)
        self._free_rows = list(reversed(range(max_requests)))
        self._used_rows: set[int] = set()
        self._resident: set[int] = set()
        self._loose: list[tuple[Extent, ...]] = []
        """Slabs that were taken for rows that do not own them yet."""

    @property
    def free_slots(self) -> int:
        """Hot slots that rows may still get."""
        return self._hot.free * self.slab.slots

    @property
    def used_slots(self) -> int:
        return self._hot.used * self.slab.slots

    @property
    def usage(self) -> float:
        """The part of the hot slots that there can be now that rows own, from 0 to 1."""
        return self._hot.used / max(1, self._hot.used + self._hot.free)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

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

        False (nothing taken) if there are not enough slabs. True at once if the room is there. Raises ValueError
        beyond the context.
        """
        if not 0 <= num_tokens <= self.max_context:
            raise ValueError(f"{num_tokens} tokens asked for, a request may have up to {self.max_context}")
        slots = num_tokens if row in self._resident else self._slots_for(num_tokens)
        hot, pages = self.slab.for_slots(slots), self.slab.for_pages(num_tokens)
        lacking = self._hot.lacks(row, hot)
        if lacking > self._hot.free or lacking + self._pages.lacks(row, pages) > self._slabs.free:
            return False
        self._hot.grow(row, hot)
        self._pages.grow(row, pages)
        return True

    def room(self, row: int) -> int:
        """For how many tokens a row has index pages and hot slots."""
        slabs = self._hot.counts[row]
        hot = slabs * self.slab.slots
        if row not in self._resident:
            short = min(hot, self.device_buffer_size + 1 - self.window)
            hot = self.max_context if slabs >= self.buffer_slabs else short
        return min(hot, self._pages.counts[row] * self.slab.page_tokens, self.max_context)

    # Resident rows

    def is_resident(self, row: int) -> bool:
        return row in self._resident

    @property
    def resident_rows(self) -> int:
        return len(self._resident)

    def spare(self, row: int) -> int:
        """Slabs that a row gives back when it ceases to be resident."""
        return max(0, self._hot.counts[row] - self.buffer_slabs) if row in self._resident else 0

    @property
    def loose_slots(self) -> int:
        """Hot slots that were taken for rows that do not own them yet. Any thread may ask."""
        return sum(extent.length for taken in list(self._loose) for extent in taken) * self.slab.slots

    @property
    def resident_slots(self) -> int:
        """Hot slots that resident rows own. Any thread may ask."""
        return sum(self._hot.counts.get(row, 0) for row in list(self._resident)) * self.slab.slots

    def take(self, slabs: int) -> tuple[Extent, ...] | None:
        """Take slabs for a row that shall become resident, or None if fewer are free."""
        taken = self._hot.take(slabs)
        if taken is not None:
            self._loose.append(taken)
        return taken

    def slots_of(self, taken: tuple[Extent, ...]) -> npt.NDArray[np.int64]:
        """The hot slots of slabs, in their order."""
        first = self._hot.locations(taken)[:, None]
        return (first + np.arange(self.hot_granule)).flatten()

    def drop(self, taken: tuple[Extent, ...]) -> None:
        """Give back what `take` returned."""
        self._loose.remove(taken)
        self._hot.drop(taken)

    def make_resident(self, row: int, taken: tuple[Extent, ...] | None = None) -> None:
        """A row becomes resident. taken: slabs of `take`, which hold its positions in order, in place of its own; None
        for a short row, whose own ones do."""
        if taken is not None:
            self._loose.remove(taken)
            self._hot.replace(row, taken)
        self._resident.add(row)
        self.identity[row] = self.max_context + self.window

    def can_make_long(self, row: int) -> bool:
        """Whether a row has the slabs of a long one, or finds them."""
        return self._hot.lacks(row, self.buffer_slabs) <= self._hot.free

    def make_long(self, row: int, num_tokens: int) -> int:
        """Make a resident row a long one, which keeps the slabs of its newest tokens. Returns the position that is at
        hot index 0 then."""
        first = min(self.slab.for_slots(max(0, num_tokens - self.device_buffer_size)), self.spare(row))
        if self.spare(row):
            self._hot.keep(row, first, self.buffer_slabs)
        else:
            self._hot.grow(row, self.buffer_slabs)
        self._resident.remove(row)
        self.identity[row] = self.device_buffer_size
        return first * self.slab.slots

    # Admission

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens finds slabs, those that resident rows give back included."""
        spare = sum(map(self.spare, self._resident)) + self.loose_slots // self.slab.slots
        return self._has_free(self.slab.for_slots(self._slots_for(num_tokens)), num_tokens, spare)

    def can_take(self, slabs: int, num_tokens: int) -> bool:
        """Whether as many slabs are free for a row that shall become resident, and others for the next request, of
        `num_tokens` tokens, if there is a row for one."""
        if self._free_rows:
            return self._has_free(slabs + self.buffer_slabs, num_tokens)
        return self._has_free(slabs, 0)

    def _has_free(self, hot: int, num_tokens: int, spare: int = 0) -> bool:
        """Whether as many slabs are free for hot slots, and for the index keys of tokens, and then for every row one
        more of each kind that it may yet need. spare: those that are about to be."""
        hot += sum(self._hot.counts[row] < self.buffer_slabs for row in self._used_rows)
        most = self.slab.for_pages(self.max_context)
        pages = self.slab.for_pages(num_tokens) + sum(self._pages.counts[row] < most for row in self._used_rows)
        return hot <= self._hot.free + spare and hot + pages <= self._slabs.free + spare

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
        self._hot.release(row)
        self._pages.release(row)
        if row in self._resident:
            self._resident.remove(row)
            self.identity[row] = self.device_buffer_size
        self.host_slot_of[row] = -1
        self._free_rows.append(row)

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless what rows own is exactly what is used, each slab once."""
        loose = [extent for taken in self._loose for extent in taken]
        check_owners(self._slabs, [*self._hot.owned(), *self._pages.owned(), *loose])
        if sorted([*self._free_rows, *self._used_rows]) != list(range(self.max_requests)):
            raise SlotAccountingError(f"rows used {sorted(self._used_rows)}, free {sorted(self._free_rows)}")

    def _slots_for(self, num_tokens: int) -> int:
        is_short = num_tokens - 1 + self.window <= self.device_buffer_size
        return num_tokens if is_short else self.device_buffer_size + self.window
