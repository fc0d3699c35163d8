"""The prefix cache of a pool: slots that keep the KV of tokens when no request needs it.

`BlockCache` knows which tokens have KV and which blocks are evicted first. Here its blocks own slots (of a paged pool:
pages), by the reference counts of `SlotAllocator`: the cache owns each slot of its blocks once, and every request that
has a slot owns it once, shared or not. So a request releases all of its slots alike. The KV of a position never
changes, so nothing is copied.

A request also holds the blocks that it has slots of (`HostSlots.held`) until its slots are released: evicting such a
block would free nothing. Slots of blocks without holders count as free (`evictable_slots`).

The caller inserts only KV that is complete and verified, and that nobody writes to any more.
"""

from dataclasses import replace

import numpy as np

from base.block_hashes import BLOCK_TOKENS
from kvcache.block_cache import BlockCache, PromptIds
from kvcache.extents import NO_SLOTS, Extent, HostSlots, SlotAccountingError, SlotAllocator, extents_of

_CHECKED_BLOCKS = 256
"""A larger cache is not checked whenever a node becomes idle: it would take longer than a short request."""


class PrefixCache:
    """Owns slots of the allocator that it gets. One thread uses both."""

    def __init__(self, slots: SlotAllocator, slot_tokens: int = 1) -> None:
        """slot_tokens: of a slot. Blocks must be whole slots."""
        self._slots = slots
        self._block_slots = BLOCK_TOKENS // slot_tokens
        self.blocks = BlockCache(max(1, slots.num_slots // self._block_slots), self._block_slots)

    @property
    def evictable_slots(self) -> int:
        """Slots that nobody else owns: `evict` makes them free."""
        return self.blocks.evictable_blocks * self._block_slots

    def hold(self, tokens: PromptIds, salt: str = "") -> HostSlots:
        """Slots of the longest cached prefix of `tokens`, ids [n]. The caller is one of their owners.

        Nobody may write to them.
        """
        held = self.blocks.hold(tokens, salt)
        if not len(held):
            return NO_SLOTS
        extents = extents_of(held.values.ravel())
        self._slots.retain(extents)
        return HostSlots(extents, held)

    def insert(self, tokens: PromptIds, slots: HostSlots, salt: str = "") -> HostSlots:
        """Cache the whole blocks that `tokens`, ids [n], begins with. Returns the caller's slots, which hold them now.

        slots: in the order of the tokens. Blocks that are cached already keep the slots that they have. What the slots
        hold beyond `tokens` they go on holding.
        """
        blocks = len(tokens) // BLOCK_TOKENS
        if blocks <= slots.held_blocks:
            return slots
        values = slots.slots()[: blocks * self._block_slots].reshape(blocks, self._block_slots)
        held, present = self.blocks.insert(tokens, values, salt)
        self._slots.retain(extents_of(values[present : len(held)].ravel()))
        self.let_go(slots)
        return replace(slots, held=held)

    def share(self, tokens: PromptIds, slots: HostSlots, salt: str = "") -> HostSlots:
        """`insert`, and exchange slots for those of blocks that were cached already, so that nothing is kept twice.

        Nobody may be reading the caller's slots. Returns the slots that it owns now.
        """
        slots = self.insert(tokens, slots, salt)
        if slots.held is None or np.array_equal(slots.held.values.ravel(), slots.slots()[: slots.held.values.size]):
            return slots
        shared = extents_of(slots.held.values.ravel())
        own, rest = slots.cut(slots.held.values.size)
        self._slots.retain(shared)
        self._slots.release(own)
        return HostSlots(shared, slots.held).extend(rest)

    def let_go(self, slots: HostSlots) -> None:
        """Release the blocks that slots hold. The pool calls it when it releases the slots."""
        if slots.held is not None:
            self.blocks.release(slots.held)

    def evict(self, slots: int) -> None:
        """Evict the least recently used blocks, until `slots` more slots are free or every block is held."""
        values = self.blocks.evict(-(-slots // self._block_slots))
        before = self._slots.free
        # In order: blocks of one prompt, whose last goes first, are mostly one extent.
        self._slots.release(extents_of(np.sort(values.ravel())))
        if (freed := self._slots.free - before) != values.size:
            raise SlotAccountingError(f"of {values.size} slots that nobody held {freed} are free now")

    def clear(self) -> None:
        """Evict all blocks without holders."""
        self.evict(self.evictable_slots)

    def check_integrity(self, thorough: bool = True) -> None:
        """Raise SlotAccountingError unless the cache owns its slots. thorough: check the cache whatever its size."""
        if not thorough and self.blocks.blocks > _CHECKED_BLOCKS:
            return
        self.blocks.check_integrity()
        self._slots.check_held(self.blocks.all_values().ravel())


def allocate_slots(slots: SlotAllocator, cache: PrefixCache | None, count: int) -> tuple[Extent, ...] | None:
    """Free slots, and evicted ones of the cache if there are too few; None if these are too few, too.

    cache: of these slots, if there is one.
    """
    missing = count - slots.free
    if cache is not None and 0 < missing <= cache.evictable_slots:
        cache.evict(missing)
    return slots.allocate(count)
