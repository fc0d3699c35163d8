"""What lookups and insertions of a long prompt take."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from base.block_hashes import BLOCK_TOKENS, block_hashes
from benchmarks.percentiles import Percentiles
from kvcache.prefix_tree import PrefixTree

PROMPT_TOKENS = 131_072
VOCAB_SIZE = 154_880
TURNS = 64
_PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
_REPEATS = 50


@dataclass(frozen=True)
class OperationTime:
    """ms: over the repeats. limit_ms: what it must not exceed, if that was said."""

    name: str
    ms: Percentiles
    limit_ms: float | None


def measure_operations() -> list[OperationTime]:
    """Operations on prompts of 128K random tokens, in a tree with the slots of several of them."""
    generator = np.random.default_rng(0)
    tree = PrefixTree(16 * _PROMPT_BLOCKS, BLOCK_TOKENS, VOCAB_SIZE)
    # Also writes every place once: fresh memory costs page faults, and a node has been running for a while.
    slots = _slots(tree.capacity)

    def random_prompt() -> np.ndarray:
        return generator.integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32)

    for _ in range(16):
        tree.insert(random_prompt(), next(slots))
    tree.evict(2 * _PROMPT_BLOCKS)
    cached = random_prompt()
    whole = tree.insert(cached, next(slots)).match.values
    turned = random_prompt()
    of_turned = next(slots)
    for turn in range(1, TURNS + 1):
        blocks = turn * _PROMPT_BLOCKS // TURNS
        tree.insert(turned[: blocks * BLOCK_TOKENS], of_turned[:blocks])

    def prepare_insert() -> Callable[[], object]:
        prompt = random_prompt()
        values = tree.evict(_PROMPT_BLOCKS).values
        return lambda: tree.insert(prompt, values)

    def always(operation: Callable[[], object]) -> Callable[[], Callable[[], object]]:
        return lambda: operation

    unknown = random_prompt()
    operations: list[tuple[str, Callable[[], Callable[[], object]], float | None]] = [
        ("lookup, cached in one piece", always(lambda: tree.lookup(cached)), 1.0),
        (f"lookup, cached in {TURNS} turns", always(lambda: tree.lookup(turned)), 1.0),
        ("lookup, not cached", always(lambda: tree.lookup(unknown)), 1.0),
        ("insert, all there", always(lambda: tree.insert(cached, whole)), 2.0),
        ("insert, all new", prepare_insert, 2.0),
        ("hashes for gateways", always(lambda: block_hashes(cached)), None),
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
