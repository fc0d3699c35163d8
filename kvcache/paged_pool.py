"""The paged KV pool of a prefill node."""

import math
from functools import cached_property

import torch

from kvcache.extents import SlotAllocator, expand, extents_of
from kvcache.host_memory import HostMemory
from kvcache.layout import KVLayout, buffer_info
from transfer.memory import BufferInfo
from transfer.planner import Int64s


class PagedKVPool:
    """Pages of KV items and index keys: uint8 `[layers][pages * page_size][bytes]`, the same page in every layer.

    Page p holds the positions [p * page_size, (p + 1) * page_size). A page may have several owners, and is free when
    none is left. One thread allocates, retains and frees.
    """

    def __init__(self, layout: KVLayout, num_pages: int, page_size: int, device: torch.device) -> None:
        rows = num_pages * page_size
        self.layout = layout
        self.page_size = page_size
        self.slots = SlotAllocator(num_pages)
        self.kv = _zeros((layout.num_layers, rows, layout.item_bytes), device)
        self.index_keys = _zeros((layout.num_index_layers, rows, layout.index_key_bytes), device)

    @property
    def num_pages(self) -> int:
        return self.slots.num_slots

    @property
    def free_pages(self) -> int:
        return self.slots.free

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_tokens: int) -> Int64s | None:
        """Pages for `num_tokens` tokens, int64, with one owner, or None if there are not enough."""
        extents = self.slots.allocate(self.pages_for(num_tokens))
        return None if extents is None else expand(extents)

    def free(self, pages: Int64s) -> None:
        """One owner less for each of these different pages. Raises SlotAccountingError if one is free."""
        self.slots.release(extents_of(pages))

    def get_contiguous_buf_infos(self) -> BufferInfo:
        """The buffers of the layout; an item is one token in one of them."""
        return buffer_info([*self.kv, *self.index_keys])


def _zeros(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    # In large memory pages, if the machine has them: they make access to scattered tokens faster.
    return HostMemory(math.prod(shape), shareable=False, populated=False).tensor(0, shape)


class PagedSequence:
    """One request's pages, as the model's PrefillCache. Page numbers are copied to the device at their first use."""

    def __init__(self, pool: PagedKVPool, pages: Int64s) -> None:
        self._pool = pool
        self._numbers = pages

    @cached_property
    def _pages(self) -> torch.Tensor:
        return torch.from_numpy(self._numbers).to(self._pool.kv.device)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop, device=self._pages.device)
        return self._pages[positions // self._pool.page_size] * self._pool.page_size + positions % self._pool.page_size

    def kv(self, layer: int) -> torch.Tensor:
        return self._pool.kv[layer]

    def index_keys(self, index_layer: int) -> torch.Tensor:
        return self._pool.index_keys[index_layer]
