"""What the gateway knows of nodes' caches, and which node it sends a session to."""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from base.block_hashes import BlockHashes, block_hashes
from control.messages import CacheUpdate
from gateway.prefix_routing import PrefixIndex, ranked

NOTHING: BlockHashes = np.empty(0, dtype=np.uint64)
NODES = ("one", "two", "three")


@pytest.mark.parametrize(
    ("cached", "load", "expected"),
    [
        ({}, (0, 0, 0), "one"),
        ({}, (9000, 5000, 6000), "two"),
        ({"three": 64}, (0, 0, 0), "three"),
        ({"one": 4096}, (14_000, 10_000, 10_000), "one"),
        ({"one": 4096}, (40_000, 10_000, 10_000), "two"),
        ({"one": 32_768}, (40_000, 10_000, 10_000), "one"),
        ({"one": 2048, "two": 4096}, (0, 0, 0), "two"),
        ({"one": 4096, "three": 4096}, (3000, 0, 2000), "three"),
    ],
    ids=[
        "all equal: the first",
        "nothing is cached: the emptiest",
        "one block is cached",
        "a little fuller",
        "much fuller",
        "much fuller, but the prefix is long",
        "the longer prefix",
        "equal prefixes, equal worth: the emptier one",
    ],
)
def test_the_choice(cached: dict[str, int], load: tuple[int, int, int], expected: str) -> None:
    assert ranked(dict(zip(NODES, load, strict=True)), cached)[0] == expected


class SimulatedNode:
    """A decode node without KV. Its cache holds hashes of blocks, the last used at the end."""

    def __init__(self, name: str, index: PrefixIndex, capacity: int) -> None:
        self.name = name
        self.load = self.known_load = 0
        self._index, self._capacity = index, capacity
        self._serial = 0
        self._cached: dict[int, None] = {}

    def cached(self, hashes: BlockHashes) -> int:
        """Tokens at the beginning of a prompt."""
        return 64 * sum(1 for _ in itertools.takewhile(self._cached.__contains__, hashes.tolist()))

    def end(self, hashes: BlockHashes) -> None:
        """Cache what a request leaves, and tell the gateway."""
        before = set(self._cached)
        for name in reversed(hashes.tolist()):
            self._cached.pop(name, None)
            self._cached[name] = None
        for name in list(self._cached)[: max(0, len(self._cached) - self._capacity)]:
            del self._cached[name]
        gained, lost = [name for name in hashes.tolist() if name not in before], before - self._cached.keys()
        self._serial += 1
        self._index.apply(
            self.name, CacheUpdate.of(self._serial, np.array(gained, np.uint64), np.array(sorted(lost), np.uint64))
        )


def test_sessions_find_what_is_cached_and_fill_nodes_evenly() -> None:
    """1,000 sessions on three nodes; heartbeats tell loads each second."""
    rng = np.random.default_rng(0)
    index = PrefixIndex(max_blocks=4000)
    nodes = {name: SimulatedNode(name, index, capacity=4000) for name in NODES}
    systems = [rng.integers(0, 32_000, length) for length in (300, 800, 1500, 4000)]
    found = findable = requests = 0
    fullest = mean = now = 0.0

    def session() -> Iterator[float]:
        """Yields seconds to wait."""
        nonlocal found, findable, requests
        history = systems[rng.integers(4)]
        for _ in range(1 + min(15, int(rng.exponential(5)))):
            question = rng.integers(0, 32_000, int(rng.lognormal(5.5, 1.0)))
            history = np.concatenate([history, question])
            hashes = block_hashes(history.astype(np.int32))
            load = {node.name: node.known_load for node in nodes.values()}
            node = nodes[ranked(load, index.matched(hashes))[0]]
            requests += 1
            found += node.cached(hashes)
            findable += max(other.cached(hashes) for other in nodes.values())
            answer = int(rng.integers(50, 500))
            history = np.concatenate([history, rng.integers(0, 32_000, answer)])
            tokens = len(history)
            node.load += tokens
            node.known_load += tokens
            yield 0.03 * answer
            node.load -= tokens
            node.end(block_hashes(history.astype(np.int32)))
            yield rng.exponential(20.0)

    def heartbeats() -> Iterator[float]:
        while True:
            for node in nodes.values():
                node.known_load = node.load
            yield 1.0

    starts = np.cumsum(rng.exponential(1.0, 1000))
    events = [(0.0, 0, heartbeats()), *((start, 1 + i, session()) for i, start in enumerate(starts))]
    heapq.heapify(events)
    while len(events) > 1:
        then, number, process = heapq.heappop(events)
        loads = [node.load for node in nodes.values()]
        fullest, mean, now = fullest + (then - now) * max(loads), mean + (then - now) * sum(loads) / 3, then
        if (seconds := next(process, None)) is not None:
            heapq.heappush(events, (now + seconds, number, process))
    assert requests > 3000
    assert findable > 10_000_000
    assert found >= 0.95 * findable
    assert fullest <= 1.5 * mean


def prompt(number: int, blocks: int) -> npt.NDArray[np.int32]:
    """Prompts with different numbers share nothing."""
    return np.full(64 * blocks, number, dtype=np.int32)


def names(number: int, blocks: int) -> BlockHashes:
    return block_hashes(prompt(number, blocks))


def gained(serial: int, hashes: BlockHashes, whole: bool = False) -> CacheUpdate:
    return CacheUpdate.of(serial, hashes, NOTHING, whole)


def test_a_prompt_is_matched_up_to_the_first_missing_block() -> None:
    index = PrefixIndex(100)
    index.apply("one", gained(1, names(1, 4)))
    index.apply("two", gained(1, names(1, 4)[[0, 1, 3]]))
    index.apply("three", gained(1, names(2, 4)))
    assert index.matched(names(1, 6)) == {"one": 256, "two": 128, "three": 0}
    assert index.matched(block_hashes(prompt(1, 6), "tenant")) == {"one": 0, "two": 0, "three": 0}
    index.forget("one")
    assert index.matched(names(1, 6)) == {"two": 128, "three": 0}


def test_an_update_that_comes_twice_counts_once() -> None:
    index = PrefixIndex(100)
    first = gained(1, names(1, 4))
    index.apply("one", first)
    index.apply("one", CacheUpdate.of(2, NOTHING, names(1, 4)[2:]))
    index.apply("one", first)
    assert index.serial("one") == 2
    assert index.matched(names(1, 4)) == {"one": 128}


def test_what_was_lost_and_gained_again_is_there() -> None:
    index = PrefixIndex(100)
    index.apply("one", CacheUpdate.of(1, gained=names(1, 2), lost=names(1, 2)))
    assert index.matched(names(1, 2)) == {"one": 128}


def test_a_missing_update_shows_in_the_serial_until_a_whole_one_comes() -> None:
    index = PrefixIndex(100)
    index.apply("one", gained(1, names(1, 4)))
    index.apply("one", gained(3, names(2, 4)))
    index.apply("one", CacheUpdate.of(4, NOTHING, names(1, 4)[3:]))
    assert index.serial("one") == 1
    assert index.matched(names(2, 4)) == {"one": 256}, "what is known helps even so"
    index.apply("one", gained(5, names(2, 3), whole=True))
    assert index.serial("one") == 5
    assert index.matched(names(1, 4)) == {"one": 0}
    assert index.matched(names(2, 4)) == {"one": 192}
    index.apply("one", gained(6, names(1, 1)))
    assert index.serial("one") == 6


def test_restarts_of_either_side_begin_with_nothing() -> None:
    index = PrefixIndex(100)
    index.apply("boot 1", gained(17, names(1, 1)))
    assert index.serial("boot 1") == 0
    index.apply("boot 1", gained(18, names(1, 4), whole=True))
    index.apply("boot 2", gained(1, NOTHING))
    assert (index.serial("boot 1"), index.serial("boot 2")) == (18, 1)
    assert index.matched(names(1, 4)) == {"boot 1": 256, "boot 2": 0}


def test_blocks_used_longest_ago_go_first_and_ends_before_beginnings() -> None:
    index = PrefixIndex(max_blocks=8)
    index.apply("one", gained(1, names(1, 4)))
    index.apply("one", gained(2, names(2, 4)))
    index.matched(names(1, 4))
    index.apply("one", gained(3, names(3, 2)))
    assert index.blocks("one") == 8
    assert [index.matched(names(number, 4))["one"] for number in (1, 2, 3)] == [256, 128, 128]
    index.apply("one", gained(4, names(4, 50), whole=True))
    assert index.matched(names(4, 50)) == {"one": 8 * 64}
