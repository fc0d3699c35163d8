"""Gives every rank the whole of prefixes of which each has read, and verified, a block."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from kvcache.paged_pool import PagedKVPool
from model.split import GatherRows
from prefill_node.orders import DividedPrefix
from transfer.planner import expand_pages

_MOST_ROWS = 8192
"""Of a rank, that are gathered at once: it bounds the memory that this takes in addition to the pool."""


class PrefixGather:
    """Gathers the rows of blocks layer by layer. All ranks call it with the same prefixes, between the same steps.

    Pages have the same numbers in all ranks, so the positions of a block give its rows in every pool.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        rank: int,
        gather: GatherRows,
        most_rows: int = _MOST_ROWS,
    ) -> None:
        """rank: of this process. most_rows: of a rank, at once."""
        self._pool = pool
        self._rank = rank
        self._gather = gather
        self._most_rows = most_rows

    @torch.inference_mode()
    def run(self, prefixes: Sequence[DividedPrefix]) -> None:
        """Send the rows of this rank's blocks, and store those of all. Waits for the other ranks."""
        for prefix in prefixes:
            for ranges in cut(prefix.bounds, self._most_rows):
                self._gather_once(prefix, ranges)

    def _gather_once(self, prefix: DividedPrefix, ranges: Sequence[range]) -> None:
        device = self._pool.kv.device
        width = max(map(len, ranges))
        rows = [self._rows(prefix, positions) for positions in ranges]
        # Collectives need equal numbers. What stands in for missing rows is not stored.
        own = torch.zeros(width, dtype=torch.int64)
        own[: len(rows[self._rank])] = rows[self._rank]
        among = [torch.arange(other * width, other * width + len(block)) for other, block in enumerate(rows)]
        sent, stored, gathered = own.to(device), torch.cat(rows).to(device), torch.cat(among).to(device)
        for layer in (*self._pool.kv, *self._pool.index_keys):
            layer.index_copy_(0, stored, self._gather(layer[sent])[gathered])

    def _rows(self, prefix: DividedPrefix, positions: range) -> torch.Tensor:
        """Of the pool: int64 [len(positions)]."""
        return torch.from_numpy(expand_pages(prefix.pages, self._pool.page_size, positions.start, positions.stop))


def cut(bounds: Sequence[int], most: int) -> Iterator[list[range]]:
    """The positions of blocks, as `DividedPrefix.bounds`, in pieces of at most so many of each block."""
    for first in range(0, max(stop - start for start, stop in pairwise(bounds)), most):
        yield [range(min(start + first, stop), min(start + first + most, stop)) for start, stop in pairwise(bounds)]
