"""The prefix cache of a paged pool: which pages have KV that a later prompt can use."""

from dataclasses import dataclass

from base.block_hashes import BLOCK_TOKENS
from kvcache.block_cache import BlockCache, PromptIds
from kvcache.extents import NO_SLOTS, HostSlots, SlotAccountingError
from kvcache.paged_pool import PagedKVPool
from kvcache.prefix_cache import PrefixCache, allocate_slots
from transfer.planner import Int64s


def can_cache(page_size: int) -> bool:
    """Whether blocks of 64 tokens are whole pages. Otherwise a page could hold tokens that two prompts do not share."""
    return BLOCK_TOKENS % page_size == 0


@dataclass(eq=False)
class PageLease:
    """The pages of one prompt, until `PageCache.give_back`.

    tokens: its ids [n]. slots: pages of all tokens, each of which the lease owns, and the cached blocks that it holds.
    cached: tokens at its beginning that had KV when the lease began.
    """

    tokens: PromptIds
    salt: str
    slots: HostSlots
    cached: int

    @property
    def pages(self) -> Int64s:
        """A copy: other threads read it."""
        return self.slots.slots()


class PageCache:
    """Lends the pages of a pool to prompts, and keeps those with whole blocks of computed tokens in a `PrefixCache`.

    prefixes: that cache; None if nothing is ever kept.

    A page in the cache is never written again: a prompt that shares it computes into its own pages after it. Cached
    pages that no lease holds count as free. One thread calls it.
    """

    def __init__(self, pool: PagedKVPool, is_on: bool = False) -> None:
        """is_on: keep blocks. Raises ValueError if blocks are no whole pages."""
        self.pool = pool
        if is_on and not can_cache(pool.page_size):
            raise ValueError(f"pages of {pool.page_size} tokens: blocks of {BLOCK_TOKENS} are no whole pages")
        has_room = pool.num_pages * pool.page_size >= BLOCK_TOKENS
        self.prefixes = PrefixCache(pool.slots, pool.page_size) if is_on and has_room else None

    @property
    def blocks(self) -> BlockCache | None:
        """The cached blocks; None if nothing is ever kept."""
        return self.prefixes.blocks if self.prefixes else None

    @property
    def cached_pages(self) -> int:
        """Pages in the cache that no lease holds."""
        return self.prefixes.evictable_slots if self.prefixes else 0

    def find(self, tokens: PromptIds, salt: str = "") -> int:
        """How many tokens at the beginning of a prompt, ids [n], have KV now."""
        return self.prefixes.blocks.find(tokens, salt) if self.prefixes else 0

    def lend(self, tokens: PromptIds, salt: str = "", reuse: bool = True) -> PageLease | None:
        """Pages for all tokens of a prompt, those of its longest cached prefix first. None if there are not enough.

        reuse: without it no cached page is used.
        """
        shared = self.prefixes.hold(tokens, salt) if self.prefixes and reuse else NO_SLOTS
        cached = len(shared) * self.pool.page_size
        own = allocate_slots(self.pool.slots, self.prefixes, self.pool.pages_for(len(tokens) - cached))
        if own is None:
            self._release(shared)
            return None
        return PageLease(tokens, salt, shared.extend(own), cached)

    def extend(self, lease: PageLease) -> bool:
        """Use what was cached since the lease began, in place of its own pages. Whether there is any.

        Call it before anything is computed in the lease: the pages that it gives back are empty.
        """
        if self.prefixes is None:
            return False
        shared = self.prefixes.hold(lease.tokens, lease.salt)
        cached = len(shared) * self.pool.page_size
        if cached <= lease.cached:
            self._release(shared)
            return False
        replaced, rest = lease.slots.cut(len(shared))
        self._release(HostSlots(replaced, lease.slots.held))
        lease.slots, lease.cached = shared.extend(rest), cached
        return True

    def insert(self, lease: PageLease, computed: int) -> None:
        """Keep the whole blocks of a prompt's first `computed` tokens, which have KV.

        Blocks that another prompt brought first keep their pages; the lease keeps its own pages of these.
        """
        if self.prefixes is not None:
            lease.slots = self.prefixes.insert(lease.tokens[:computed], lease.slots, lease.salt)

    def give_back(self, lease: PageLease) -> None:
        """End a lease: nothing reads or writes its pages any more."""
        self._release(lease.slots)

    def check_idle(self) -> None:
        """Raise SlotAccountingError unless every page is free or cached: for when there are no leases."""
        if self.pool.free_pages + self.cached_pages != self.pool.num_pages:
            raise SlotAccountingError(
                f"no prompt has pages, but of {self.pool.num_pages} only {self.pool.free_pages} are free and "
                f"{self.cached_pages} cached: the others leaked"
            )

    def _release(self, slots: HostSlots) -> None:
        self.pool.slots.release(slots.extents)
        if self.prefixes:
            self.prefixes.let_go(slots)
