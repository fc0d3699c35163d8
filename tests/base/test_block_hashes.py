"""Hashes of blocks: the same on every node, of a whole prefix, and different for each salt and seed."""

import struct

import numpy as np
import xxhash

from base.block_hashes import BLOCK_TOKENS, block_hashes


def test_hashes_are_as_specified() -> None:
    tokens = list(range(200))
    expected, name = [], xxhash.xxh3_64_intdigest(b"tenant", 5)
    for begin in range(0, 192, BLOCK_TOKENS):
        name = xxhash.xxh3_64_intdigest(struct.pack("<64i", *tokens[begin : begin + BLOCK_TOKENS]), name)
        expected.append(name)
    for dtype in (np.int32, np.int64, ">i4"):
        assert block_hashes(np.array(tokens, dtype=dtype), "tenant", 5).tolist() == expected
    assert block_hashes(np.array(tokens[:63])).tolist() == []


def test_a_hash_is_of_all_tokens_before_of_the_salt_and_of_the_seed() -> None:
    tokens = np.arange(1, 257, dtype=np.int32)
    changed = tokens.copy()
    changed[70] = 0
    same = block_hashes(tokens) == block_hashes(changed)
    assert same.tolist() == [True, False, False, False]
    assert not (block_hashes(tokens) == block_hashes(tokens, "salt")).any()
    assert not (block_hashes(tokens) == block_hashes(tokens, seed=1)).any()
    repeated = np.zeros(256, dtype=np.int32)
    assert len(set(block_hashes(repeated).tolist())) == 4
