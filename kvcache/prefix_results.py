"""What the prefix cache answers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from base.block_hashes import BLOCK_TOKENS, BlockHashes
from kvcache.block_store import BlockValues


@dataclass(frozen=True)
class PrefixMatch:
    """The longest cached prefix of a prompt, in whole blocks.

    values: int32 [blocks, width], a copy. node, evictions: for the tree; a match that nobody holds is void after the
    next eviction.
    """

    values: BlockValues
    node: int
    evictions: int

    @property
    def blocks(self) -> int:
        return len(self.values)

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


@dataclass(frozen=True)
class PrefixInsertion:
    """What became of blocks that were inserted.

    match: all of them, as they are cached now. present: so many of them, the first ones, were there already.
    is_duplicate: bool [blocks], those that were there with other values; the caller still owns the values that it gave
    for them.
    """

    match: PrefixMatch
    present: int
    is_duplicate: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EvictedBlocks:
    """Blocks that left the cache, in the order in which they left.

    values: int32 [blocks, width]. hashes: uint64 [blocks].
    """

    values: BlockValues
    hashes: BlockHashes
