"""The prefix cache of a paged pool: which pages have KV that a later prompt can use."""

from dataclasses import dataclass

import numpy as np

from base.block_hashes import BLOCK_TOKENS, BlockHasher, BlockHashes
from control.cache_reports import CacheReports
from kvcache.extents import SlotAccountingError
from kvcache.paged_pool import PagedKVPool
from kvcache.prefix_results import PrefixMatch
from kvcache.prefix_tree import PrefixTree, TokenIds
from transfer.planner import Int64s


def can_cache(page_size: int) -> bool:
    """Whether blocks of 64 tokens are whole pages. Otherwise a page could hold tokens that two prompts do not share."""
    return BLOCK_TOKENS % page_size == 0


@dataclass(eq=False)
class PageLease:
    """The pages of one prompt, until `PageCache.give_back`.

    tokens: its ids [n]. pages: int64, of all tokens, each of which the lease owns; replaced and never changed, since
    other threads read it. cached: tokens at its beginning that had KV when the lease began. inserted: tokens whose
    blocks are in the tree. match: these blocks, which the lease holds; None without a cache.
    """

    tokens: TokenIds
    salt: str
    pages: Int64s
    cached: int
    inserted: int
    match: PrefixMatch | None
    hashes: BlockHashes | None = None
    """Of all blocks of the prompt, once they were needed."""


class PageCache:
    """Lends the pages of a pool to prompts, and keeps those with whole blocks of computed tokens for later prompts.

    Owners of a page are the leases of the prompts that it has tokens of, and the tree, from `insert` on. A page in the
    tree is never written again: a prompt that shares it computes behind it. A lease also *holds* the blocks that it has
    pages of, since giving up those would free nothing. Blocks that no lease holds are given up when a prompt needs
    pages, the least recently used first; so to a prompt their pages are as good as free. One thread calls it.
    """

    def __init__(self, pool: PagedKVPool, vocab_size: int | None = None, seed: int = 0) -> None:
        """vocab_size: token ids are below it; None for no cache. seed: of the hashes of blocks (`cache_seed`).

        Raises ValueError if blocks are no whole pages.
        """
        self.pool = pool
        self.reports: CacheReports | None = None
        """Hears which blocks come and go."""
        self._hasher = BlockHasher(seed)
        self._tree: PrefixTree | None = None
        self._block_pages = BLOCK_TOKENS // pool.page_size
        if vocab_size is not None:
            if not can_cache(pool.page_size):
                raise ValueError(f"pages of {pool.page_size} tokens: blocks of {BLOCK_TOKENS} are no whole pages")
            if blocks := pool.num_pages // self._block_pages:
                self._tree = PrefixTree(blocks, self._block_pages, vocab_size)

    @property
    def is_on(self) -> bool:
        """Whether anything is ever kept."""
        return self._tree is not None

    @property
    def cached_pages(self) -> int:
        """Pages in the tree that no lease holds."""
        return self._tree.evictable_blocks * self._block_pages if self._tree else 0

    def find(self, tokens: TokenIds, salt: str = "") -> int:
        """How many tokens at the beginning of a prompt, ids [n], have KV now."""
        return self._tree.lookup(tokens, salt).tokens if self._tree else 0

    def lend(self, tokens: TokenIds, salt: str = "", reuse: bool = True) -> PageLease | None:
        """Pages for all tokens of a prompt, those of its longest cached prefix first. None if there are not enough.

        reuse: without it no cached page is used.
        """
        match = self._hold(tokens if reuse else tokens[:0], salt)
        cached = match.tokens if match else 0
        own = self._allocate(len(tokens) - cached)
        if own is None:
            self._release(match)
            return None
        return PageLease(tokens, salt, self._shared(match, own), cached, cached, match)

    def extend(self, lease: PageLease) -> bool:
        """Use what was cached since the lease began, in place of pages of its own. Whether there is any.

        To be called before anything was computed in the lease: the pages that it gives back are empty.
        """
        match = self._hold(lease.tokens, lease.salt)
        if match is None or match.tokens <= lease.cached:
            self._release(match)
            return False
        replaced, rest = np.split(lease.pages, [match.blocks * self._block_pages])
        lease.pages = self._shared(match, rest)
        self.pool.free(replaced)
        self._release(lease.match)
        lease.match, lease.cached, lease.inserted = match, match.tokens, match.tokens
        return True

    def insert(self, lease: PageLease, computed: int) -> None:
        """Keep the whole blocks of a prompt's first `computed` tokens, which have KV.

        Blocks that another prompt brought first stay as they are; the lease keeps its own pages of these.
        """
        blocks = computed // BLOCK_TOKENS
        if self._tree is None or blocks * BLOCK_TOKENS <= lease.inserted:
            return
        values = lease.pages[: blocks * self._block_pages].reshape(blocks, self._block_pages)
        hashes = self._hashes(lease)[:blocks]
        insertion = self._tree.insert(lease.tokens[: blocks * BLOCK_TOKENS], values, lease.salt, hashes)
        self.pool.retain(values[insertion.present :].ravel())
        self._tree.retain(insertion.match)
        self._release(lease.match)
        lease.match, lease.inserted = insertion.match, blocks * BLOCK_TOKENS
        if self.reports is not None:
            self.reports.gained(hashes[insertion.present :])

    def give_back(self, lease: PageLease) -> None:
        """End a lease: nothing reads or writes its pages any more."""
        self.pool.free(lease.pages)
        self._release(lease.match)

    def newest(self, limit: int) -> BlockHashes:
        """Hashes of the cached blocks that were used last, at most so many, the newest first: uint64 [n]."""
        return self._tree.newest_hashes(limit) if self._tree else np.empty(0, dtype=np.uint64)

    def drop(self) -> None:
        """Give up all cached pages that no lease holds."""
        if self._tree:
            self._evict(self._tree.evictable_blocks)

    def check_idle(self) -> None:
        """Raise SlotAccountingError unless every page is free or cached: for when there are no leases."""
        if self.pool.free_pages + self.cached_pages != self.pool.num_pages:
            raise SlotAccountingError(
                f"no prompt has pages, but of {self.pool.num_pages} only {self.pool.free_pages} are free and "
                f"{self.cached_pages} cached: the others leaked"
            )

    def check_integrity(self) -> None:
        """Raise SlotAccountingError if the tree's tables do not agree."""
        if self._tree:
            self._tree.check_integrity()

    def _hold(self, tokens: TokenIds, salt: str) -> PrefixMatch | None:
        """The longest cached prefix, held; None without a cache."""
        if self._tree is None:
            return None
        match = self._tree.lookup(tokens, salt)
        self._tree.retain(match)
        return match

    def _release(self, match: PrefixMatch | None) -> None:
        if self._tree is not None and match is not None:
            self._tree.release(match)

    def _allocate(self, num_tokens: int) -> Int64s | None:
        """Pages for so many tokens, from the cache if too few are free."""
        lacking = self.pool.pages_for(num_tokens) - self.pool.free_pages
        if 0 < lacking <= self.cached_pages:
            self._evict(-(-lacking // self._block_pages))
        return self.pool.allocate(num_tokens)

    def _evict(self, blocks: int) -> None:
        assert self._tree is not None
        evicted = self._tree.evict(blocks)
        self.pool.free(evicted.values.astype(np.int64).ravel())
        if self.reports is not None:
            self.reports.lost(evicted.hashes)

    def _hashes(self, lease: PageLease) -> BlockHashes:
        if lease.hashes is None:
            lease.hashes = self._hasher(lease.tokens, lease.salt)
        return lease.hashes

    def _shared(self, match: PrefixMatch | None, rest: Int64s) -> Int64s:
        """The pages of a match, which have one owner more, and then `rest`."""
        if match is None:
            return rest
        shared = match.values.astype(np.int64).ravel()
        self.pool.retain(shared)
        return np.concatenate([shared, rest])
