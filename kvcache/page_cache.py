"""The prefix cache of a paged pool: which pages have KV that a later prompt can use."""

from dataclasses import dataclass

import numpy as np

from base.block_hashes import BLOCK_TOKENS
from kvcache.block_cache import BlockCache, PromptIds
from kvcache.extents import HeldBlocks, SlotAccountingError
from kvcache.paged_pool import PagedKVPool
from transfer.planner import Int64s


def can_cache(page_size: int) -> bool:
    """Whether blocks of 64 tokens are whole pages. Otherwise a page could hold tokens that two prompts do not share."""
    return BLOCK_TOKENS % page_size == 0


@dataclass(eq=False)
class PageLease:
    """The pages of one prompt, until `PageCache.give_back`.

    tokens: its ids [n]. pages: int64, of all tokens, each of which the lease owns; replaced and never changed, since
    other threads read it. cached: tokens at its beginning that had KV when the lease began. held: the cached blocks
    that the lease has pages of; None without a cache.
    """

    tokens: PromptIds
    salt: str
    pages: Int64s
    cached: int
    held: HeldBlocks | None


class PageCache:
    """Lends the pages of a pool to prompts, and keeps those with whole blocks of computed tokens for later prompts.

    Owners of a page are the leases of the prompts that it has tokens of and, from `insert` on, the cache. A page in the
    cache is never written again: a prompt that shares it computes into pages of its own after it. A lease also holds
    the blocks that it has pages of, since evicting those would free nothing. Blocks without holders are evicted when a
    prompt needs pages, the least recently used first, so their pages count as free. One thread calls it.
    """

    def __init__(self, pool: PagedKVPool, is_on: bool = False) -> None:
        """is_on: keep blocks. Raises ValueError if blocks are no whole pages."""
        self.pool = pool
        self.blocks: BlockCache | None = None
        self._block_pages = BLOCK_TOKENS // pool.page_size
        if is_on and not can_cache(pool.page_size):
            raise ValueError(f"pages of {pool.page_size} tokens: blocks of {BLOCK_TOKENS} are no whole pages")
        if is_on and (capacity := pool.num_pages // self._block_pages):
            self.blocks = BlockCache(capacity, self._block_pages)

    @property
    def is_on(self) -> bool:
        """Whether anything is ever kept."""
        return self.blocks is not None

    @property
    def cached_pages(self) -> int:
        """Pages in the cache that no lease holds."""
        return self.blocks.evictable_blocks * self._block_pages if self.blocks else 0

    def find(self, tokens: PromptIds, salt: str = "") -> int:
        """How many tokens at the beginning of a prompt, ids [n], have KV now."""
        return self.blocks.find(tokens, salt) if self.blocks else 0

    def lend(self, tokens: PromptIds, salt: str = "", reuse: bool = True) -> PageLease | None:
        """Pages for all tokens of a prompt, those of its longest cached prefix first. None if there are not enough.

        reuse: without it no cached page is used.
        """
        held = self.blocks.hold(tokens if reuse else tokens[:0], salt) if self.blocks else None
        cached = held.num_tokens if held else 0
        own = self._allocate(len(tokens) - cached)
        if own is None:
            self._release(held)
            return None
        return PageLease(tokens, salt, self._shared(held, own), cached, held)

    def extend(self, lease: PageLease) -> bool:
        """Use what was cached since the lease began, in place of pages of its own. Whether there is any.

        To be called before anything was computed in the lease: the pages that it gives back are empty.
        """
        if self.blocks is None:
            return False
        held = self.blocks.hold(lease.tokens, lease.salt)
        if held.num_tokens <= lease.cached:
            self._release(held)
            return False
        replaced, rest = np.split(lease.pages, [len(held) * self._block_pages])
        lease.pages = self._shared(held, rest)
        self.pool.free(replaced)
        self._release(lease.held)
        lease.held, lease.cached = held, held.num_tokens
        return True

    def insert(self, lease: PageLease, computed: int) -> None:
        """Keep the whole blocks of a prompt's first `computed` tokens, which have KV.

        Blocks that another prompt brought first keep their pages; the lease keeps its own pages of these.
        """
        blocks = computed // BLOCK_TOKENS
        if self.blocks is None or lease.held is None or blocks <= len(lease.held):
            return
        values = lease.pages[: blocks * self._block_pages].reshape(blocks, self._block_pages)
        held, present = self.blocks.insert(lease.tokens[: blocks * BLOCK_TOKENS], values, lease.salt)
        self.pool.retain(values[present : len(held)].ravel())
        self._release(lease.held)
        lease.held = held

    def give_back(self, lease: PageLease) -> None:
        """End a lease: nothing reads or writes its pages any more."""
        self.pool.free(lease.pages)
        self._release(lease.held)

    def drop(self) -> None:
        """Evict all cached pages that no lease holds."""
        if self.blocks:
            self._evict(self.blocks.evictable_blocks)

    def check_idle(self) -> None:
        """Raise SlotAccountingError unless every page is free or cached: for when there are no leases."""
        if self.pool.free_pages + self.cached_pages != self.pool.num_pages:
            raise SlotAccountingError(
                f"no prompt has pages, but of {self.pool.num_pages} only {self.pool.free_pages} are free and "
                f"{self.cached_pages} cached: the others leaked"
            )

    def check_integrity(self) -> None:
        """Raise SlotAccountingError if the cache's tables do not agree."""
        if self.blocks:
            self.blocks.check_integrity()

    def _release(self, held: HeldBlocks | None) -> None:
        if self.blocks and held is not None:
            self.blocks.release(held)

    def _allocate(self, num_tokens: int) -> Int64s | None:
        """Pages for that many tokens, from the cache if too few are free."""
        lacking = self.pool.pages_for(num_tokens) - self.pool.free_pages
        if 0 < lacking <= self.cached_pages:
            self._evict(-(-lacking // self._block_pages))
        return self.pool.allocate(num_tokens)

    def _evict(self, num_blocks: int) -> None:
        assert self.blocks is not None
        self.pool.free(self.blocks.evict(num_blocks).astype(np.int64).ravel())

    def _shared(self, held: HeldBlocks | None, rest: Int64s) -> Int64s:
        """The pages of held blocks, which have one owner more, and then `rest`."""
        if held is None:
            return rest
        shared = held.values.astype(np.int64).ravel()
        self.pool.retain(shared)
        return np.concatenate([shared, rest])
