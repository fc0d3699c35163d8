"""Hashes by which nodes and gateways name cached blocks of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK_TOKENS = 64
"""Tokens of a block, the unit of prefix caches."""

BlockHashes = npt.NDArray[np.uint64]
"""[blocks]: the hash of each block of a prompt."""


@dataclass(frozen=True, eq=False)
class StoredBlocks:
    """Blocks of one prompt that came into a cache. tokens: their ids [64 * blocks].

    parent: the hash of the block before them, or None. salt: of the prompt.
    """

    hashes: BlockHashes
    tokens: npt.NDArray[np.integer]
    parent: int | None
    salt: str


def block_hashes(tokens: npt.NDArray[np.integer], salt: str = "", seed: int = 0) -> BlockHashes:
    """XXH3 of each whole block of `tokens`, ids [n], and of all before it: uint64 [n // 64].

    A block is hashed as 64 little-endian int32, with the hash of the block before it as seed. The first one's is the
    hash of `salt` under `seed`, a secret of the deployment, without which hashes do not tell what was asked. Two
    prefixes with one hash cost a hit at most, since nodes compare token ids.
    """
    blocks = len(tokens) // BLOCK_TOKENS
    ids = np.ascontiguousarray(tokens[: blocks * BLOCK_TOKENS], dtype="<i4").view(np.uint8).data
    step = 4 * BLOCK_TOKENS
    name = xxhash.xxh3_64_intdigest(salt.encode(), seed)
    names = []
    for begin in range(0, len(ids), step):
        name = xxhash.xxh3_64_intdigest(ids[begin : begin + step], name)
        names.append(name)
    return np.array(names, dtype=np.uint64)


@dataclass(frozen=True)
class BlockHasher:
    """`block_hashes` under one seed."""

    seed: int

    def __call__(self, tokens: Sequence[int] | npt.NDArray[np.integer], salt: str = "") -> BlockHashes:
        """tokens: ids, below 2^31."""
        return block_hashes(np.asarray(tokens, dtype=np.int32), salt, self.seed)
