"""The prefix cache: which blocks of tokens have KV in a pool, and which of them are given up first.

A radix tree over blocks of 64 token ids. A path from the root spells a prompt; a node is a run of blocks with no branch
within. A block has *values*, which say where its KV is: 64 host slots on a decode node, pages on a prefill node. The
tree owns the values of its blocks from `insert` until `evict` returns them. It reads no KV and frees nothing itself:
the caller inserts only what was verified, and frees what it gets back. Roots are told apart by a *salt*: prompts with
different salts share nothing. Token ids are compared, in packed form (`token_blocks`); hashes only find candidates.

**Use and order.** `lookup`, `insert` and `release` use blocks: a lookup those that matched, an insertion all blocks of
its path, and a release those that nobody holds any more. Of one use, a block counts as older than the block before it.
So a block is never older than what is behind it, and the oldest block of all is the last one of a leaf. `evict` takes
the oldest block that nobody holds, again and again: LRU by leaves, exact for single blocks. (vLLM has this order by
freeing the blocks of a request from the last to the first; SGLang keeps a heap of leaves, whose upkeep was a bottleneck
with many short prompts.)

For nodes this is one linked list. A use moves the nodes of its path to the newest end, the deepest first. A node whose
blocks were not all used is cut in two before, so the blocks of a node always have the same age. Each operation costs
the same for a node of one block and for one of a thousand, and evicting costs nothing for what stays.

**Holding.** `retain` holds a match until `release`. A held node and all above it are pinned: not in the list, never
evicted. Only the last node of a match is marked, and a node counts its pinned children, so that `retain` and `release`
stop at the first node above that stays as it was. A cut keeps the number of a node for its lower part, where those who
hold the node end.

**Memory.** All tables are allocated at the start: `bookkeeping_bytes` is at most 200 bytes a block with a vocabulary of
up to 2^18 tokens, token ids included, whatever the shape of the tree; values come on top. A salt that has blocks costs
some 300 bytes more.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from base.block_hashes import BLOCK_TOKENS, BlockHashes
from kvcache.block_store import BlockRun, BlockStore, BlockValues
from kvcache.child_table import ChildTable
from kvcache.extents import SlotAccountingError
from kvcache.int_table import NONE
from kvcache.prefix_nodes import PrefixNodes
from kvcache.prefix_results import EvictedBlocks, PrefixInsertion, PrefixMatch
from kvcache.prefix_roots import PrefixRoots
from kvcache.recency_list import RecencyList
from kvcache.token_blocks import PackedBlocks, TokenPacking

TokenIds = npt.NDArray[np.integer]
"""[n]: a prompt."""


class PrefixTree:
    """The tree that the module describes, for up to `capacity` blocks. Not thread-safe: one thread owns a pool.

    evictable_blocks: blocks that nobody holds, which can be counted as free.
    """

    def __init__(self, capacity: int, width: int, vocab_size: int) -> None:
        """width: values of a block."""
        if capacity < 1:
            raise ValueError(f"a prefix cache for {capacity} blocks: it must have room for at least 1")
        self.capacity = capacity
        self.width = width
        self.evictable_blocks = 0
        self._packing = TokenPacking(vocab_size)
        self._store = BlockStore(capacity, self._packing.words, width)
        self._nodes = PrefixNodes(capacity)
        self._roots = PrefixRoots()
        self._children = ChildTable(capacity)
        self._recency = RecencyList(capacity)
        self._evictions = 0

    @property
    def blocks(self) -> int:
        """Blocks in the tree."""
        return self.capacity - self._store.free

    @property
    def held_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.blocks - self.evictable_blocks

    @property
    def num_nodes(self) -> int:
        return self._nodes.num_used

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of all tables but the values, which were allocated at the start; salts not included."""
        parts = (self._store, self._nodes, self._children, self._recency)
        return sum(part.bookkeeping_bytes for part in parts)

    def lookup(self, tokens: TokenIds, salt: str = "") -> PrefixMatch:
        """The longest cached prefix of `tokens`, ids [n], which is used by this.

        Raises ValueError for an id outside of the vocabulary.
        """
        path, _ = self._walk(self._packing.pack(tokens), salt)
        return self._use(path)

    def retain(self, match: PrefixMatch) -> None:
        """Hold the blocks of a match: they are not evicted before a `release` of the same match.

        Raises SlotAccountingError if blocks were evicted since the lookup: some of these might be among them. A second
        holder looks the prompt up for itself.
        """
        if match.evictions != self._evictions:
            raise SlotAccountingError(f"a match of {match.blocks} blocks is held after an eviction; look it up again")
        nodes, node = self._nodes, match.node
        if node == NONE:
            return
        if not nodes.pinned(node):
            self._pin(node)
        nodes.holders[node] += 1

    def release(self, match: PrefixMatch) -> None:
        """Undo one `retain` of a match. Raises SlotAccountingError if nobody holds it."""
        nodes, node = self._nodes, match.node
        if node == NONE:
            return
        if nodes.holders[node] < 1:
            raise SlotAccountingError(f"a match of {match.blocks} blocks is released, but nobody holds it")
        nodes.holders[node] -= 1
        if not nodes.pinned(node):
            self._unpin(node)

    def newest_hashes(self, limit: int) -> BlockHashes:
        """Hashes of the blocks that are held, and then of those that were used last, at most `limit`: uint64 [n]."""
        nodes = self._nodes
        runs, length = [], 0
        for node in itertools.chain(filter(nodes.pinned, nodes.used()), reversed(self._recency)):
            if length >= limit:
                break
            runs.append(nodes.run(node))
            length += nodes.length[node]
        return self._store.hashes(runs)[:limit]

    def insert(
        self, tokens: TokenIds, values: npt.NDArray[np.integer], salt: str = "", hashes: BlockHashes | None = None
    ) -> PrefixInsertion:
        """Add the whole blocks that `tokens` begins with. The tree owns the values of those that it lacked.

        tokens: ids [n]. values: [n // 64, width], each in the range of int32. hashes: uint64 [n // 64], what `evict`
        is to return beside the values; 0 without. Raises ValueError for values of another shape, for an id outside of
        the vocabulary and if there is no room: nothing is evicted here, since the caller has to free it.
        """
        expected = (len(tokens) // BLOCK_TOKENS, self.width)
        if values.shape != expected:
            raise ValueError(f"values of shape {values.shape} for {len(tokens)} tokens, expected {expected}")
        packed = self._packing.pack(tokens)
        path, present = self._walk(packed, salt)
        missing = len(packed) - present
        if missing > self._store.free:
            raise ValueError(f"{missing} blocks are inserted, the prefix cache has room for {self._store.free}")
        if hashes is None:
            hashes = np.zeros(len(packed), dtype=np.uint64)
        if missing:
            parent = path[-1] if path else self._roots.open(salt)
            for run in self._store.put(packed[present:], values[present:].astype(np.int32), hashes[present:]):
                parent = self._attach(parent, run)
                path.append(parent)
        match = self._use(path)
        return PrefixInsertion(match, present, (match.values != values).any(axis=1))

    def evict(self, blocks: int) -> EvictedBlocks:
        """Give up the `blocks` oldest blocks that nobody holds, or all of these if there are fewer."""
        missing = min(blocks, self.evictable_blocks)
        gone: list[BlockRun] = []
        while missing > 0:
            node = self._recency.oldest()
            run = self._nodes.run(node)
            kept = max(0, run.length - missing)
            gone.append(BlockRun(run.start + kept, run.length - kept))
            missing -= run.length - kept
            if kept:
                self._nodes.length[node] = kept
            else:
                self._detach(node)
        evicted = EvictedBlocks(
            np.concatenate([self._store.values([]), *(self._store.values([run])[::-1] for run in gone)]),
            np.concatenate([self._store.hashes([]), *(self._store.hashes([run])[::-1] for run in gone)]),
        )
        for run in gone:
            self._store.give(run)
            self.evictable_blocks -= run.length
        self._evictions += bool(gone)
        return evicted

    def all_values(self) -> BlockValues:
        """The values of every block, in no order: int32 [blocks, width]."""
        return self._store.values([self._nodes.run(node) for node in self._nodes.used()])

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless the tables agree with each other and no values are owned twice."""
        nodes = self._nodes
        used = nodes.used()
        runs = [nodes.run(node) for node in used]
        places = np.concatenate(
            [np.arange(run.start, run.start + run.length) for run in runs] or [np.empty(0, np.int64)]
        )
        _require(np.array_equal(np.sort(places), self._store.used_places()), "places are lost or in two nodes")
        values = self._store.values(runs)
        _require(len(np.unique(values)) == values.size, "values are owned twice")
        pinned_children = dict.fromkeys(used, 0)
        children_of_roots: dict[int, int] = {}
        for node in used:
            parent = nodes.parent[node]
            if parent < 0:
                children_of_roots[parent] = children_of_roots.get(parent, 0) + 1
            else:
                pinned_children[parent] += nodes.pinned(node)
            found = [n for n, _ in self._find(parent, self._store.first(nodes.run(node))[None])]
            _require(found == [node], f"node {node} is found as {found}")
        _require(children_of_roots == self._roots.children(), "children of roots are miscounted")
        _require(all(nodes.pinned_children[n] == count for n, count in pinned_children.items()), "pins are miscounted")
        order = {node: age for age, node in enumerate(self._recency)}
        _require(set(order) == {node for node in used if not nodes.pinned(node)}, "the list lacks nodes or has others")
        _require(all(order[n] < order[nodes.parent[n]] for n in order if nodes.parent[n] in order), "a parent is older")
        evictable = sum(nodes.length[node] for node in order)
        _require(evictable == self.evictable_blocks, f"{evictable} blocks can be evicted, not {self.evictable_blocks}")

    def _walk(self, packed: PackedBlocks, salt: str) -> tuple[list[int], int]:
        """The nodes, from the root, that spell the longest cached prefix of `packed`, and its blocks."""
        path: list[int] = []
        parent, at = self._roots.find(salt), 0
        while parent is not None and at < len(packed):
            node, common = next(self._find(parent, packed[at:]), (NONE, 0))
            if node == NONE:
                break
            at += common
            if common < self._nodes.length[node]:
                path.append(self._split(node, common))
                break
            path.append(node)
            parent = node
        return path, at

    def _find(self, parent: int, packed: PackedBlocks) -> Iterator[tuple[int, int]]:
        """The child of `parent`, at most one, that begins as `packed` does, and for how many blocks it goes on so."""
        for node in self._children.candidates(parent, packed[0]):
            if self._nodes.parent[node] == parent and (common := self._store.common(self._nodes.run(node), packed)):
                yield node, common

    def _use(self, path: list[int]) -> PrefixMatch:
        """Make the blocks of a path the newest."""
        for node in reversed(path):
            if not self._nodes.pinned(node):
                self._recency.remove(node)
                self._recency.append(node)
        values = self._store.values([self._nodes.run(node) for node in path])
        return PrefixMatch(values, path[-1] if path else NONE, self._evictions)

    def _split(self, node: int, blocks: int) -> int:
        """Cut a node behind its first `blocks` blocks. Returns the upper part, which the caller uses at once.

        `node` is the lower part now.
        """
        nodes, children = self._nodes, self._children
        run = nodes.run(node)
        upper = nodes.create(nodes.parent[node], BlockRun(run.start, blocks))
        children.remove(node)
        children.add(upper, nodes.parent[upper], self._store.first(nodes.run(upper)))
        nodes.parent[node] = upper
        nodes.start[node], nodes.length[node] = run.start + blocks, run.length - blocks
        children.add(node, upper, self._store.first(nodes.run(node)))
        if nodes.pinned(node):
            nodes.pinned_children[upper] = 1
        else:
            self._recency.append(upper)
        return upper

    def _attach(self, parent: int, run: BlockRun) -> int:
        """A new leaf, the newest node."""
        node = self._nodes.create(parent, run)
        self._children.add(node, parent, self._store.first(run))
        self._recency.append(node)
        self.evictable_blocks += run.length
        if parent < 0:
            self._roots.gained_child(parent)
        return node

    def _detach(self, node: int) -> None:
        """Remove a leaf that is not pinned."""
        parent = self._nodes.parent[node]
        self._recency.remove(node)
        self._children.remove(node)
        self._nodes.free(node)
        if parent < 0:
            self._roots.lost_child(parent)

    def _pin(self, node: int) -> None:
        """Take a node that is about to be pinned, and those above it that are not, out of the list."""
        nodes = self._nodes
        while True:
            self._recency.remove(node)
            self.evictable_blocks -= nodes.length[node]
            node = nodes.parent[node]
            if node < 0:
                return
            was_pinned = nodes.pinned(node)
            nodes.pinned_children[node] += 1
            if was_pinned:
                return

    def _unpin(self, node: int) -> None:
        """Put a node that is no longer pinned, and those above it that were pinned for its sake, into the list."""
        nodes = self._nodes
        while True:
            self._recency.append(node)
            self.evictable_blocks += nodes.length[node]
            node = nodes.parent[node]
            if node < 0:
                return
            nodes.pinned_children[node] -= 1
            if nodes.pinned(node):
                return


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise SlotAccountingError(f"prefix cache: {problem}")
