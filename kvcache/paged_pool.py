"""The paged KV pool of a prefill node."""

import math
from collections import deque
from functools import cached_property

import numpy as np
import torch

from kvcache.extents import SlotAccountingError
from kvcache.host_memory import HostMemory
from kvcache.layout import KVLayout, buffer_info
from transfer.memory import BufferInfo
from transfer.planner import Int64s


class PagedKVPool:
    """Pages of KV items and index keys: uint8 `[layers][pages * page_size][bytes]`, the same page in every layer.

    A row is one token in one layer; page p holds the rows [p * page_size, (p + 1) * page_size). A page may have several
    owners, and is free when none is left. One thread allocates, retains and frees.
    """

    def __init__(self, layout: KVLayout, num_pages: int, page_size: int, device: torch.device) -> None:
        rows = num_pages * page_size
        self.layout = layout
        self.page_size = page_size
        self.num_pages = num_pages
        self.kv = _zeros((layout.num_layers, rows, layout.item_bytes), device)
        self.index_keys = _zeros((layout.num_index_layers, rows, layout.index_key_bytes), device)
        self._free = deque(range(num_pages))
        self._owners = np.zeros(num_pages, dtype=np.int32)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_tokens: int) -> Int64s | None:
        """Pages for so many tokens, int64, with one owner, or None if there are not enough."""
        count = self.pages_for(num_tokens)
        if count > len(self._free):
            return None
        pages = np.array([self._free.popleft() for _ in range(count)], dtype=np.int64)
        self._owners[pages] = 1
        return pages

    def retain(self, pages: Int64s) -> None:
        """One more owner for each of these different pages. Raises SlotAccountingError if one is free."""
        self._check_owned(pages)
        self._owners[pages] += 1

    def free(self, pages: Int64s) -> None:
        """One owner less for each of these different pages. Raises SlotAccountingError if one is free."""
        self._check_owned(pages)
        self._owners[pages] -= 1
        self._free.extend(pages[self._owners[pages] == 0].tolist())

    def _check_owned(self, pages: Int64s) -> None:
        if not self._owners[pages].all():
            raise SlotAccountingError(f"page {pages[self._owners[pages] == 0][0]} is free, but somebody uses it")

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
