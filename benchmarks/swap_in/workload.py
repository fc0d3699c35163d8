"""Pools and selections in which every launch has the same number of misses, over and over."""

from dataclasses import dataclass

import torch

from base.errors import StartupError
from base.memory import cpus_near
from hisparse.device_pool import DeviceKVPool
from hisparse.residency import Residency
from hisparse.slabs import SlabLayout
from hisparse.swap_in import Span
from kvcache.host_pool import HostKVPool
from kvcache.layout import KVLayout

_INDEX_PAGE = 64
_NEW_PER_QUERY = 0.25
"""Positions that a query adds to those of the queries before it, in units of top-k: about what a trained model does."""


@dataclass(frozen=True)
class Shape:
    """What is swapped in. context: tokens per request, all on the host. queries: of a request in a launch."""

    top_k: int
    hot_size: int
    item_bytes: int
    context: int
    queries: int = 1

    @property
    def window(self) -> int:
        return max(1, 2 * (self.queries - 1))

    @property
    def union(self) -> int:
        """Distinct positions that the queries of a request select."""
        return self.top_k + (self.queries - 1) * int(_NEW_PER_QUERY * self.top_k)


class Tiers:
    """The pools of one layer, with `max_batch` long requests whose host slots are scattered over the host pool."""

    def __init__(self, shape: Shape, max_batch: int) -> None:
        self.shape = shape
        device = torch.device("cuda", torch.cuda.current_device())
        layout = KVLayout((0,), shape.item_bytes, 16)
        slab = SlabLayout.of(layout, _INDEX_PAGE, shape.hot_size)
        self.host = HostKVPool(layout, max_batch * shape.context, pin=True, cpus=cpus_near(device))
        self.device = DeviceKVPool(
            layout,
            num_slabs=max_batch * (slab.for_slots(shape.hot_size + shape.window) + slab.for_pages(shape.context)),
            index_page_size=_INDEX_PAGE,
            max_requests=max_batch,
            max_context=shape.context,
            device_buffer_size=shape.hot_size,
            device=device,
            window=shape.window,
        )
        self.residency = Residency(1, max_batch, shape.context, shape.hot_size, device, shape.window)
        slots = torch.randperm(max_batch * shape.context).numpy()
        for at in range(max_batch):
            row = self.device.allocate_row(shape.context)
            if row is None:
                raise RuntimeError(f"the pools have no room for request {at} of {max_batch}")
            self.device.set_host_slots(row, 0, slots[at * shape.context : (at + 1) * shape.context])
        pattern = torch.randint(0, 256, (min(2**24, self.host.kv.nbytes),), dtype=torch.uint8)
        everything = self.host.kv.view(-1)
        for start in range(0, len(everything), len(pattern)):
            part = everything[start : start + len(pattern)]
            part.copy_(pattern[: len(part)])

    def close(self) -> None:
        torch.cuda.synchronize()
        self.host.close()


def turns(shape: Shape, misses: int) -> int:
    """Selections of a `Rotation`. Raises StartupError for misses that it cannot have."""
    length = 2 + -(-2 * (shape.hot_size - shape.union + misses) // misses) if misses else 8
    if misses > shape.union or shape.union + (length - 1) * misses > shape.context - shape.window:
        raise StartupError(
            f"{misses} misses of {shape.union} selected positions, with {shape.hot_size} hot slots: expected fewer, or "
            f"a context longer than {shape.context}"
        )
    return length


class Rotation:
    """Selections of a batch, to be launched in turn, each of which misses exactly `misses` positions per request.

    A part of each selection never changes and stays resident. The rest is new in each: by the time it is selected
    again, twice as many positions as the hot buffer has room for have been fetched since, so that it was evicted. A
    query after the first selects what the one before it does, but for some positions.

    union: int64 [length, batch, shape.union], the distinct positions. positions: int64 [length, batch * queries,
    top_k]. rows, newest: int64 [batch]; every request is at its context's end.
    """

    def __init__(self, shape: Shape, batch: int, misses: int, seed: int = 0) -> None:
        self.batch, self.misses = batch, misses
        self.num_bytes = batch * misses * shape.item_bytes  # that one launch fetches
        self.length = turns(shape, misses)
        fixed, older = shape.union - misses, shape.context - shape.window
        on = torch.device("cuda", torch.cuda.current_device())
        generator = torch.Generator(on).manual_seed(seed)
        self.rows = torch.arange(batch, device=on)
        self.newest = torch.full((batch,), older, device=on)
        self.queries = Span(self.newest, torch.full((batch,), shape.queries, device=on), shape.queries)
        self.union = torch.empty((self.length, batch, shape.union), dtype=torch.int64, device=on)
        self.positions = torch.empty((self.length, batch * shape.queries, shape.top_k), dtype=torch.int64, device=on)
        added = (shape.union - shape.top_k) // max(1, shape.queries - 1)
        for row in range(batch):
            order = torch.randperm(older, generator=generator, device=on)
            for turn in range(self.length):
                new = order[fixed + turn * misses : fixed + (turn + 1) * misses]
                shuffled = torch.randperm(shape.union, generator=generator, device=on)
                self.union[turn, row] = torch.cat([order[:fixed], new])[shuffled]
                for query in range(shape.queries):
                    selected = self.union[turn, row, query * added : query * added + shape.top_k]
                    self.positions[turn, row * shape.queries + query] = selected
