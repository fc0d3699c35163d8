"""What holding and inserting a long prompt takes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from base.block_hashes import BLOCK_TOKENS, block_hashes
from benchmarks.percentiles import Percentiles
from kvcache.block_cache import BlockCache

PROMPT_TOKENS = 131_072
VOCAB_SIZE = 154_880
_PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
_REPEATS = 50


@dataclass(frozen=True)
class OperationTime:
    """ms: over the repeats. limit_ms: what it must not exceed, if that was said."""

    name: str
    ms: Percentiles
    limit_ms: float | None


def measure_operations() -> list[OperationTime]:
    """Operations on prompts of 128K random tokens, in a cache with the slots of several of them."""
    generator = np.random.default_rng(0)
    cache = BlockCache(16 * _PROMPT_BLOCKS, BLOCK_TOKENS)
    # Also writes every entry once: fresh memory costs page faults, and a node has been running for a while.
    slots = _slots(cache.capacity)

    def random_prompt() -> np.ndarray:
        return generator.integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32)

    def insert(prompt: np.ndarray, values: np.ndarray) -> None:
        cache.release(cache.insert(prompt, values)[0])

    def hold(prompt: np.ndarray) -> None:
        cache.release(cache.hold(prompt))

    for _ in range(16):
        insert(random_prompt(), next(slots))
    cache.evict(2 * _PROMPT_BLOCKS)
    cached, of_cached = random_prompt(), next(slots)
    insert(cached, of_cached)

    def prepare_insert() -> Callable[[], object]:
        prompt = random_prompt()
        values = cache.evict(_PROMPT_BLOCKS)
        return lambda: insert(prompt, values)

    def always(operation: Callable[[], object]) -> Callable[[], Callable[[], object]]:
        return lambda: operation

    unknown = random_prompt()
    operations: list[tuple[str, Callable[[], Callable[[], object]], float | None]] = [
        ("hold and release, cached", always(lambda: hold(cached)), 2.0),
        ("hold and release, not cached", always(lambda: hold(unknown)), 1.0),
        ("insert and release, all there", always(lambda: insert(cached, of_cached)), 2.0),
        ("insert and release, all new", prepare_insert, 3.0),
        ("of these: hashes", always(lambda: block_hashes(cached)), None),
    ]
    return [OperationTime(name, _time(prepare), limit) for name, prepare, limit in operations]


def _time(prepare: Callable[[], Callable[[], object]]) -> Percentiles:
    """Milliseconds of what `prepare` returns."""
    taken = []
    for _ in range(_REPEATS):
        operation = prepare()
        begin = time.perf_counter()
        operation()
        taken.append(1000 * (time.perf_counter() - begin))
    return Percentiles.of(taken)


def _slots(blocks: int) -> Iterator[np.ndarray]:
    """Slots for one prompt after the other, of a pool with room for `blocks` blocks, over and over."""
    pool = np.arange(blocks * BLOCK_TOKENS).reshape(-1, _PROMPT_BLOCKS, BLOCK_TOKENS)
    while True:
        yield from pool
