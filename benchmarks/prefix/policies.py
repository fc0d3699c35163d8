"""Tokens of a trace that are cached when they come, by the block cache and by ways that share no code with it."""

import itertools
from collections import OrderedDict
from collections.abc import Container, Sequence

import numpy as np

from base.block_hashes import BLOCK_TOKENS
from benchmarks.prefix.trace import TracedPrompt
from kvcache.block_cache import BlockCache


def play_cache(prompts: Sequence[TracedPrompt], capacity: int) -> int:
    """Tokens that the block cache finds, with room for `capacity` blocks, used as a node uses it; each prompt is over
    at once.

    Raises AssertionError if a value was lost or given twice.
    """
    cache = BlockCache(capacity, 1)
    free = np.arange(capacity)
    hit_tokens = 0
    for prompt in prompts:
        tokens = prompt.tokens()[: capacity * BLOCK_TOKENS]
        found = cache.hold(tokens)
        hit_tokens += len(found) * BLOCK_TOKENS
        missing = len(tokens) // BLOCK_TOKENS - len(found)
        free = np.concatenate([free, cache.evict(missing - len(free))[:, 0]])
        taken, free = free[:missing], free[missing:]
        held, _ = cache.insert(tokens, np.concatenate([found.values[:, 0], taken])[:, None])
        cache.release(found)
        cache.release(held)
    cache.check_integrity()
    everything = np.concatenate([free, cache.evict(cache.blocks)[:, 0]])
    assert np.array_equal(np.sort(everything), np.arange(capacity)), "values were lost or given twice"
    return hit_tokens


class IdealCache:
    """An unlimited cache of whole blocks, which are known by numbers that are equal for equal prefixes."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def find(self, blocks: Sequence[int]) -> int:
        """Tokens of the blocks, from the first one on, that are cached."""
        return _leading(blocks, self._seen) * BLOCK_TOKENS

    def add(self, blocks: Sequence[int]) -> None:
        self._seen.update(blocks)


def play_ideal(prompts: Sequence[TracedPrompt]) -> int:
    """Tokens that an unlimited cache of whole blocks finds."""
    cache = IdealCache()
    hit_tokens = 0
    for prompt in prompts:
        blocks = prompt.blocks()
        hit_tokens += cache.find(blocks)
        cache.add(blocks)
    return hit_tokens


def play_lru(prompts: Sequence[TracedPrompt], capacity: int, from_the_end: bool) -> int:
    """Tokens that LRU over single blocks finds, which knows no tree: what is behind a block that is gone is no hit.

    from_the_end: a prompt uses its last block first, so that ends are older than beginnings, as in vLLM. Otherwise it
    uses them in their order, and beginnings are evicted first.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hit_blocks = 0
    for prompt in prompts:
        blocks = prompt.blocks()[:capacity]
        hit_blocks += _leading(blocks, cached)
        for block in reversed(blocks) if from_the_end else blocks:
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hit_blocks * BLOCK_TOKENS


def distinct_blocks(prompts: Sequence[TracedPrompt]) -> int:
    return len(set(itertools.chain.from_iterable(prompt.blocks() for prompt in prompts)))


def _leading(blocks: Sequence[int], cached: Container[int]) -> int:
    """How many blocks, from the first on, are cached."""
    return sum(1 for _ in itertools.takewhile(cached.__contains__, blocks))
