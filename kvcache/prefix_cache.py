"""The prefix cache of a decode node: slots of the host pool that keep the KV of tokens when no request needs it.

`PrefixTree` knows which tokens have KV and which blocks are given up first. Here its blocks own host slots, by the
reference counts of `SlotAllocator`: the cache owns each slot of its blocks once, and every request that has a slot owns
it once, shared or not. So a request gives back all of its slots in one way, and those that the cache owns, too, stay.
The KV of a position never changes, so nothing is copied.

A request also *holds* the blocks that it has slots of (`HostSlots.held`), from `hold` or `insert` until its slots are
released: giving up such a block would free nothing. What nobody holds is the cache's alone, and counts as free
(`evictable_slots`).

Whoever inserts answers for the KV: it is complete and verified, and nobody writes to it any more.
"""

from dataclasses import replace

import numpy as np

from base.block_hashes import BLOCK_TOKENS, BlockHasher, BlockHashes
from control.cache_reports import CacheReports
from kvcache.extents import NO_SLOTS, HostSlots, SlotAccountingError, SlotAllocator, extents_of
from kvcache.prefix_tree import PrefixTree, TokenIds

BLOCK_BYTES = 200 + 4 * BLOCK_TOKENS
"""What the cache takes of main memory for a block, at most: the tree's tables and the numbers of its slots."""
_CHECKED_BLOCKS = 256
"""A larger tree is not checked whenever a node becomes idle: it would take longer than a short request."""


class PrefixCache:
    """Owns slots of the pool whose allocator it gets. One thread uses both.

    insertions: how often blocks were added. Until then, what was not found is not there.
    """

    def __init__(self, slots: SlotAllocator, vocab_size: int) -> None:
        self._slots = slots
        self._tree = PrefixTree(max(1, slots.num_slots // BLOCK_TOKENS), BLOCK_TOKENS, vocab_size)
        self.insertions = 0
        self._reports: CacheReports | None = None
        self._hasher = BlockHasher(0)

    @property
    def cached_slots(self) -> int:
        """Slots that the cache owns."""
        return self._tree.blocks * BLOCK_TOKENS

    @property
    def evictable_slots(self) -> int:
        """Slots that nobody else owns: `evict` makes them free."""
        return self._tree.evictable_blocks * BLOCK_TOKENS

    def hold(self, tokens: TokenIds, salt: str = "") -> HostSlots:
        """Slots of the longest cached prefix of `tokens`, ids [n]. The caller owns them, beside the cache.

        Nobody may write to them. Raises ValueError for an id outside of the vocabulary.
        """
        match = self._tree.lookup(tokens, salt)
        if not match.blocks:
            return NO_SLOTS
        self._tree.retain(match)
        extents = extents_of(match.values.ravel())
        self._slots.retain(extents)
        return HostSlots(extents, match)

    def insert(self, tokens: TokenIds, slots: HostSlots, salt: str = "") -> HostSlots:
        """Cache the whole blocks that `tokens`, ids [n], begins with. Returns the caller's slots, which hold them now.

        slots: the i-th has the KV of tokens[i]. Blocks that are cached already stay with the slots that they have.
        """
        blocks = len(tokens) // BLOCK_TOKENS
        if not blocks:
            return slots
        values = slots.slots()[: blocks * BLOCK_TOKENS].reshape(blocks, BLOCK_TOKENS)
        # Only gateways want hashes, which take longer than all the rest.
        hashes = None if self._reports is None else self._hasher(tokens, salt)
        insertion = self._tree.insert(tokens, values, salt, hashes)
        self._slots.retain(extents_of(values[insertion.present :].ravel()))
        self.insertions += insertion.present < blocks
        if self._reports is not None and hashes is not None:
            self._reports.gained(hashes[insertion.present :])
        self._tree.retain(insertion.match)
        self.let_go(slots)
        return replace(slots, held=insertion.match)

    def share(self, tokens: TokenIds, slots: HostSlots, salt: str = "") -> HostSlots:
        """`insert`, and exchange slots for those of blocks that were cached already, so that nothing is kept twice.

        Nobody may be reading the caller's slots. Returns the slots that it owns now.
        """
        slots = self.insert(tokens, slots, salt)
        if slots.held is None or np.array_equal(slots.held.values.ravel(), slots.slots()[: slots.held.tokens]):
            return slots
        shared = extents_of(slots.held.values.ravel())
        own, behind = slots.cut(slots.held.tokens)
        self._slots.retain(shared)
        self._slots.release(own)
        return HostSlots(shared, slots.held).extend(behind)

    def let_go(self, slots: HostSlots) -> None:
        """Undo the hold on the blocks that slots have. The pool calls it when it releases the slots."""
        if slots.held is not None:
            self._tree.release(slots.held)

    def evict(self, slots: int) -> None:
        """Give up the blocks that were not used for longest, until `slots` more slots are free, or no block is left
        that nobody holds."""
        evicted = self._tree.evict(-(-slots // BLOCK_TOKENS))
        before = self._slots.free
        self._slots.release(extents_of(evicted.values.ravel()))
        if self._slots.free - before != evicted.values.size:
            freed = self._slots.free - before
            raise SlotAccountingError(f"of {evicted.values.size} slots that nobody held {freed} are free now")
        if self._reports is not None:
            self._reports.lost(evicted.hashes)

    def clear(self) -> None:
        """Give up all blocks that nobody holds."""
        self.evict(self.evictable_slots)

    def newest(self, limit: int) -> BlockHashes:
        """Hashes of the cached blocks that were used last, at most so many, the newest first: uint64 [n]."""
        return self._tree.newest_hashes(limit)

    def report_to(self, reports: CacheReports, hasher: BlockHasher) -> None:
        """From now on tell gateways what comes and goes. To be called while nothing is cached."""
        self._reports, self._hasher = reports, hasher

    def send_reports(self, now: float) -> None:
        """Tell gateways what is to be told. To be called in every turn of the loop."""
        if self._reports is not None:
            self._reports.send(now)

    def check_integrity(self, thorough: bool = True) -> None:
        """Raise SlotAccountingError unless the cache owns its slots. thorough: check the tree whatever its size."""
        if not thorough and self._tree.blocks > _CHECKED_BLOCKS:
            return
        self._tree.check_integrity()
        self._slots.check_held(self._tree.all_values().ravel())
