"""Finds the child of a node of the prefix cache's tree."""

import random
from array import array
from collections.abc import Iterator

import numpy as np
import xxhash

from kvcache.int_table import ENTRY_BYTES, NONE, int_table
from kvcache.token_blocks import PackedBlocks

_SEED_MASK = 2**64 - 1


class ChildTable:
    """Finds a node's child by the child's first block: a hash table with chains.

    A hash only says where to look: the caller compares token ids. Its seed is random, so that nobody can choose prompts
    that are all in one chain.
    """

    def __init__(self, capacity: int) -> None:
        buckets = 1 << max(0, capacity.bit_length() - 1)
        self._mask = buckets - 1
        self._first = array("i", [NONE]) * buckets
        self._next = int_table(capacity)
        self._key = array("I", bytes(ENTRY_BYTES * capacity))
        self._seed = random.getrandbits(64)

    @property
    def bookkeeping_bytes(self) -> int:
        return ENTRY_BYTES * (len(self._first) + len(self._next) + len(self._key))

    def candidates(self, parent: int, block: PackedBlocks) -> Iterator[int]:
        """Nodes among which is the child of `parent` that begins with `block`, uint64 [words], if there is one."""
        key = self._hash(parent, block)
        node = self._first[key & self._mask]
        while node != NONE:
            if self._key[node] == key:
                yield node
            node = self._next[node]

    def add(self, node: int, parent: int, block: PackedBlocks) -> None:
        key = self._hash(parent, block)
        self._key[node] = key
        bucket = key & self._mask
        self._next[node], self._first[bucket] = self._first[bucket], node

    def remove(self, node: int) -> None:
        bucket = self._key[node] & self._mask
        at = self._first[bucket]
        if at == node:
            self._first[bucket] = self._next[node]
            return
        while self._next[at] != node:
            at = self._next[at]
        self._next[at] = self._next[node]

    def _hash(self, parent: int, block: PackedBlocks) -> int:
        seed = (self._seed + parent) & _SEED_MASK
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(block).data, seed) & 0xFFFFFFFF
