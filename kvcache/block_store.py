"""Where the prefix cache keeps its blocks: tables with a place for each block, allocated once."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from base.block_hashes import BlockHashes
from kvcache.token_blocks import PackedBlocks

BlockValues = npt.NDArray[np.int32]
"""[blocks, width]: what the cache keeps for each block, such as the host slots of its 64 tokens."""

_WINDOW = 2**14
"""Places that are searched at once for free ones."""


class BlockRun(NamedTuple):
    """The places [start, start + length) of a store."""

    start: int
    length: int

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + self.length)


class BlockStore:
    """Token ids, values and hashes of up to `capacity` blocks, in runs of places.

    Blocks that are stored together take the free places that come next, round and round, so they are in few runs: what
    is evicted one after the other was mostly stored one after the other. A place costs its token ids, 8 bytes of hash
    and one byte that says whether it is free. NumPy asks for zeroed memory, so places cost nothing before they are used
    for the first time.
    """

    def __init__(self, capacity: int, words: int, width: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._tokens: PackedBlocks = np.zeros((capacity, words), dtype=np.uint64)
        self._values: BlockValues = np.zeros((capacity, width), dtype=np.int32)
        self._hashes: BlockHashes = np.zeros(capacity, dtype=np.uint64)
        self._is_used = np.zeros(capacity, dtype=np.bool_)
        self._next = 0

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of all tables but the values."""
        return self._tokens.nbytes + self._hashes.nbytes + self._is_used.nbytes

    def put(self, tokens: PackedBlocks, values: BlockValues, hashes: BlockHashes) -> list[BlockRun]:
        """Store blocks; their runs, in the order of the blocks. The caller sees to it that enough places are free."""
        places = self._take(len(tokens))
        self._tokens[places], self._values[places], self._hashes[places] = tokens, values, hashes
        cuts = np.flatnonzero(np.diff(places) != 1) + 1
        starts, stops = [0, *cuts.tolist()], [*cuts.tolist(), len(places)]
        return [BlockRun(int(places[a]), b - a) for a, b in zip(starts, stops, strict=True)]

    def give(self, run: BlockRun) -> None:
        """Make the places of a run free again."""
        self._is_used[run.places] = False
        self.free += run.length

    def first(self, run: BlockRun) -> PackedBlocks:
        """Token ids of a run's first block: uint64 [words]."""
        block: PackedBlocks = self._tokens[run.start]
        return block

    def common(self, run: BlockRun, tokens: PackedBlocks) -> int:
        """How many blocks at the beginning of a run are the blocks that `tokens` begins with."""
        blocks = min(run.length, len(tokens))
        is_equal = self._tokens[run.start : run.start + blocks] == tokens[:blocks]
        if is_equal.all():
            return blocks
        return int(is_equal.argmin()) // int(is_equal.shape[1])

    def values(self, runs: list[BlockRun]) -> BlockValues:
        """A copy of the values of runs, one after the other."""
        if not runs:
            return self._values[:0].copy()
        return np.concatenate([self._values[run.places] for run in runs])

    def hashes(self, runs: list[BlockRun]) -> BlockHashes:
        """A copy of the hashes of runs, one after the other."""
        if not runs:
            return self._hashes[:0].copy()
        return np.concatenate([self._hashes[run.places] for run in runs])

    def used_places(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._is_used)

    def _take(self, count: int) -> npt.NDArray[np.int64]:
        """The next `count` free places, which are used from now on: int64 [count]."""
        found: list[npt.NDArray[np.int64]] = []
        missing = count
        while missing:
            window = self._is_used[self._next : self._next + _WINDOW]
            free = np.flatnonzero(~window)[:missing] + self._next
            window[free - self._next] = True
            found.append(free)
            missing -= len(free)
            self._next = int(free[-1]) + 1 if not missing else self._next + len(window)
            if self._next >= self.capacity:
                self._next = 0
        self.free -= count
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
