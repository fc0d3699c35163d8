"""The prefix cache's store: places are neither lost nor given twice, also beyond the window searched at once."""

import random

import numpy as np

from kvcache import block_store
from kvcache.block_store import BlockRun, BlockStore

CAPACITY = 2 * block_store._WINDOW + 100


def rows(first: int, count: int, width: int) -> np.ndarray:
    return np.arange(first, first + count)[:, None].repeat(width, axis=1)


def test_what_was_stored_is_found_at_its_places_in_a_store_that_is_always_nearly_full() -> None:
    generator, store = random.Random(0), BlockStore(CAPACITY, 2, 3)
    stored: list[tuple[int, list[BlockRun]]] = []
    first = 0
    for _ in range(300):
        count = generator.choice((1, 30, 3000))
        while store.free < count:
            for run in stored.pop(generator.randrange(len(stored)))[1]:
                store.give(run)
        runs = store.put(
            rows(first, count, 2).astype(np.uint64),
            rows(first, count, 3).astype(np.int32),
            np.arange(first, first + count).astype(np.uint64),
        )
        assert sum(run.length for run in runs) == count
        stored.append((first, runs))
        first += count
        places = np.concatenate([np.r_[run.places] for _, runs in stored for run in runs])
        np.testing.assert_array_equal(np.sort(places), store.used_places())
        assert store.free == CAPACITY - len(places)
    for first, runs in stored:
        count = sum(run.length for run in runs)
        np.testing.assert_array_equal(store.values(runs), rows(first, count, 3))
        np.testing.assert_array_equal(store.hashes(runs), np.arange(first, first + count))


def test_blocks_that_are_stored_together_are_in_one_run_where_places_are_free() -> None:
    store = BlockStore(100, 2, 1)
    for _ in range(20):
        (run,) = store.put(rows(0, 50, 2).astype(np.uint64), rows(0, 50, 1).astype(np.int32), np.zeros(50, np.uint64))
        store.give(run)
