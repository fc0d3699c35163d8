"""Divides a prefix that is fetched among ranks: each reads a block that it can verify by itself."""

from bisect import bisect_right

from transfer.memory import Checksum, Checksums


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
