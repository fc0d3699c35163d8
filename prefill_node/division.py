"""Divides a prefix that is fetched among ranks, and gives each of them all of it."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from kvcache.paged_pool import PagedKVPool
from model.split import GatherRows
from prefill_node.orders import DividedPrefix
from transfer.memory import Checksum, Checksums
from transfer.planner import expand_pages


def divide(checksums: Checksums, start: int, stop: int, ranks: int) -> tuple[int, ...]:
    """Bounds of as many blocks of [start, stop): rank r has [bounds[r], bounds[r + 1]).

    Blocks begin where a digest begins in every buffer, next to where blocks of equal size would begin. Where there are
    few digests some blocks are empty.
    """
    starts: dict[int, set[int]] = {}
    for buffer, at in zip(checksums.buffers, checksums.starts, strict=True):
        starts.setdefault(buffer, set()).add(at)
    shared = set.intersection(*starts.values()) if starts else set()
    borders = sorted({start, stop} | {at for at in shared if start < at < stop})
    even = [start + rank * (stop - start) / ranks for rank in range(1, ranks)]
    return start, *(min(borders, key=lambda border: abs(border - at)) for at in even), stop


def checksums_of_blocks(checksums: Checksums, bounds: tuple[int, ...]) -> list[Checksums]:
    """Those of each block, in the order of blocks.

    Every one goes to a block that is not empty, also one of positions that nobody has asked for: who reads that block
    refuses it (`prefill_node.fetch.pieces`).
    """
    blocks: list[list[Checksum]] = [[] for _ in bounds[1:]]
    first, *inner, stop = bounds
    for checksum in checksums.rows():
        blocks[bisect_right(inner, min(max(checksum.start, first), stop - 1))].append(checksum)
    return [Checksums.of(block) for block in blocks]


_MOST_ROWS = 8192
"""Of a rank, that are gathered at once: it bounds the memory that this takes in addition to the pool."""


@torch.inference_mode()
def gather_prefixes(pool: PagedKVPool, rank: int, gather: GatherRows, prefixes: Sequence[DividedPrefix]) -> None:
    """Send the rows of this rank's blocks, and store those of all, layer by layer. Waits for the other ranks.

    All ranks call it with the same prefixes, between the same steps. Pages have the same numbers in all ranks, so the
    positions of a block give its rows in every pool.
    """
    for prefix in prefixes:
        for ranges in cut(prefix.bounds, _MOST_ROWS):
            width = max(map(len, ranges))
            rows = [
                torch.from_numpy(expand_pages(prefix.pages, pool.page_size, positions.start, positions.stop))
                for positions in ranges
            ]
            # Collectives need equal numbers. What stands in for missing rows is not stored.
            own = torch.zeros(width, dtype=torch.int64)
            own[: len(rows[rank])] = rows[rank]
            among = [torch.arange(other * width, other * width + len(block)) for other, block in enumerate(rows)]
            sent, stored, gathered = (each.to(pool.kv.device) for each in (own, torch.cat(rows), torch.cat(among)))
            for layer in (*pool.kv, *pool.index_keys):
                layer.index_copy_(0, stored, gather(layer[sent])[gathered])


def cut(bounds: Sequence[int], most: int) -> Iterator[list[range]]:
    """The positions of blocks, as `DividedPrefix.bounds`, in pieces of at most `most` of each block."""
    for first in range(0, max(stop - start for start, stop in pairwise(bounds)), most):
        yield [range(min(start + first, stop), min(start + first + most, stop)) for start, stop in pairwise(bounds)]
