"""The block cache: exactly the longest cached prefix, the oldest blocks first, nothing lost and nothing owned twice."""

import random
import tracemalloc
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from base.block_hashes import BLOCK_TOKENS, BlockHashes, StoredBlocks, block_hashes
from kvcache.block_cache import BLOCK_BYTES, BlockCache
from kvcache.extents import HeldBlocks, SlotAccountingError
from tests.kvcache.prefix_model import PrefixModel

VOCAB = 154880
WIDTH = 3


def block(first: int = 7, last: int = 9) -> npt.NDArray[np.int32]:
    tokens = np.full(BLOCK_TOKENS, 5, dtype=np.int32)
    tokens[0], tokens[-1] = first, last
    return tokens


ALPHABET = {"a": block(), "b": block(last=10), "c": block(first=7 + 2**16), "d": block(last=9 + 2**17)}
"""Blocks that differ in one token, in low or in high bits."""


def tokens_of(names: str, rest: int = 0) -> npt.NDArray[np.int32]:
    """The blocks with these names, and `rest` tokens more."""
    return np.concatenate([*(ALPHABET[name] for name in names), np.full(rest, 5, dtype=np.int32)]).astype(np.int32)


def numbered(first: int, blocks: int) -> npt.NDArray[np.int64]:
    return np.arange(first, first + WIDTH * blocks).reshape(blocks, WIDTH)


def new_cache(capacity: int = 32) -> BlockCache:
    return BlockCache(capacity, WIDTH)


def insert(cache: BlockCache, names: str, first: int, salt: str = "") -> HeldBlocks:
    """Blocks with values from `first` on that nobody holds."""
    held, _ = cache.insert(tokens_of(names), numbered(first, len(names)), salt)
    cache.release(held)
    return held


@dataclass
class _Held:
    held: HeldBlocks
    salt: str
    names: tuple[str, ...]


class _Walk:
    """Random requests against a cache and the model, with a pool of values that both sides own in turn."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.capacity = self.random.choice((4, 12, 40, 90))
        self.cache = new_cache(self.capacity)
        self.model = PrefixModel()
        self.free = [tuple(row) for row in numbered(0, self.capacity + 8).tolist()]
        self.held: list[_Held] = []

    def step(self) -> None:
        salt = self.random.choice(("", "", "", "tenant"))
        names = tuple(self.random.choice("aaabcd") for _ in range(self.random.randrange(9)))
        self.random.choice((self.find, self.hold, self.insert, self.insert, self.release, self.release, self.evict))(
            salt, names
        )
        assert self.cache.blocks == len(self.model.blocks)
        assert self.cache.evictable_blocks == self.model.evictable

    def find(self, salt: str, names: tuple[str, ...]) -> None:
        found = self.cache.find(tokens_of("".join(names), self.random.randrange(BLOCK_TOKENS)), salt)
        assert found == BLOCK_TOKENS * len(self.model.lookup(salt, names))

    def hold(self, salt: str, names: tuple[str, ...]) -> None:
        held = self.cache.hold(tokens_of("".join(names), self.random.randrange(BLOCK_TOKENS)), salt)
        known = self.model.lookup(salt, names)
        assert [tuple(row) for row in held.values.tolist()] == known
        self.model.retain(salt, names[: len(known)])
        self.held.append(_Held(held, salt, names[: len(known)]))

    def insert(self, salt: str, names: tuple[str, ...]) -> None:
        """As a node does: hold what is there, make room for the rest, insert, and release the first hold."""
        before = self.cache.hold(tokens_of("".join(names)), salt)
        known = self.model.lookup(salt, names)
        self.model.retain(salt, names[: len(known)])
        self._evict(len(names) - len(known) - (self.capacity - self.cache.blocks))
        room = self.capacity - self.cache.blocks
        names = names[: len(known) + min(room, len(self.free))]
        # Some blocks that are there are computed again, as when two requests with one prompt come at once.
        shared = self.random.randint(0, len(known)) if len(self.free) >= len(names) else len(known)
        taken = [self.free.pop() for _ in range(len(names) - shared)]
        given = known[:shared] + taken
        held, present = self.cache.insert(
            tokens_of("".join(names), self.random.randrange(BLOCK_TOKENS)),
            np.array(given, dtype=np.int64).reshape(-1, WIDTH),
            salt,
        )
        self.model.insert(salt, names, given)
        self.model.retain(salt, names)
        assert present == len(known)
        assert [tuple(row) for row in held.values.tolist()] == known + given[len(known) :]
        self.free += given[shared : len(known)]
        self.held.append(_Held(held, salt, names))
        self.cache.release(before)
        self.model.release(salt, names[: len(known)])

    def release(self, salt: str = "", names: tuple[str, ...] = ()) -> None:
        if self.held:
            held = self.held.pop(self.random.randrange(len(self.held)))
            self.cache.release(held.held)
            self.model.release(held.salt, held.names)

    def evict(self, salt: str, names: tuple[str, ...]) -> None:
        self._evict(len(names))

    def finish(self) -> None:
        """Without requests and with the cache dropped, everything is free."""
        while self.held:
            self.release()
        self.cache.check_integrity()
        self._evict(self.cache.blocks)
        assert self.cache.blocks == self.cache.evictable_blocks == 0
        self.cache.check_integrity()
        assert sorted(self.free) == [tuple(row) for row in numbered(0, self.capacity + 8).tolist()]

    def _evict(self, count: int) -> None:
        gone = [tuple(row) for row in self.cache.evict(max(0, count)).tolist()]
        assert gone == self.model.evict(count)
        self.free += gone


def _walk(seed: int, prompts: int = 250) -> None:
    walk = _Walk(seed)
    for prompt in range(prompts):
        walk.step()
        if prompt % 25 == 0:
            walk.cache.check_integrity()
    walk.finish()


@pytest.mark.parametrize("prompts", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_prompts_get_what_a_dictionary_says(prompts: int) -> None:
    for seed in range(prompts // 250):
        _walk(seed)


@pytest.mark.parametrize(
    ("names", "salt", "hashes", "num_held", "num_present"),
    [
        ("ab", "", [1, 2], 2, 2),
        ("db", "", [1, 2], 0, 0),
        ("ad", "", [1, 2], 1, 1),
        ("ab", "two", [1, 2], 0, 0),
        ("cb", "", [3, 2], 1, 0),
    ],
)
def test_of_two_blocks_with_one_hash_the_first_is_kept(
    names: str, salt: str, hashes: list[int], num_held: int, num_present: int
) -> None:
    """Equal hashes find a block only if its tokens, its parent and its salt are equal."""
    cache = new_cache()
    cache.insert(tokens_of("ab"), numbered(0, 2), "", np.array([1, 2], dtype=np.uint64))
    held, present = cache.insert(tokens_of(names), numbered(9, 2), salt, np.array(hashes, dtype=np.uint64))
    assert (len(held), present) == (num_held, num_present)
    cache.check_integrity()


def test_salts_share_nothing_and_are_forgotten_with_their_blocks() -> None:
    cache = new_cache()
    insert(cache, "ab", 0, salt="one")
    assert cache.find(tokens_of("ab")) == cache.find(tokens_of("ab"), salt="two") == 0
    insert(cache, "ab", 100, salt="two")
    np.testing.assert_array_equal(cache.hold(tokens_of("ab"), salt="one").values, numbered(0, 2))
    assert len(cache.evict(4)) == 2
    assert list(cache._salt_of.values()) == ["one"]


class Heard:
    """Notes what a cache says."""

    def __init__(self) -> None:
        self.stored_hashes: list[int] = []
        self.removed_hashes: list[int] = []

    def stored(self, blocks: StoredBlocks) -> None:
        self.stored_hashes += blocks.hashes.tolist()

    def removed(self, hashes: BlockHashes) -> None:
        self.removed_hashes += hashes.tolist()


def test_each_block_is_said_to_come_once_and_to_go_once() -> None:
    cache, heard = new_cache(), Heard()
    cache.report_to(heard, seed=7)
    names = block_hashes(tokens_of("abc"), seed=7).tolist()
    insert(cache, "ab", 0)
    insert(cache, "abc", 0)
    assert heard.stored_hashes == names
    cache.evict(2)
    cache.evict(0)
    assert heard.removed_hashes == names[:0:-1]


def test_newest_hashes_are_of_held_blocks_and_then_of_recent_ones() -> None:
    cache = new_cache()
    names = [block_hashes(tokens_of(name)).tolist() for name in ("aa", "bb", "cc")]
    cache.insert(tokens_of("aa"), numbered(0, 2))
    insert(cache, "bb", 6)
    insert(cache, "cc", 12)
    assert cache.newest(99).tolist() == names[0] + names[2] + names[1]
    assert cache.newest(5).tolist() == names[0] + names[2] + names[1][:1]
    assert new_cache().newest(5).tolist() == []


def test_wrong_use_is_refused() -> None:
    cache = new_cache(capacity=3)
    held = insert(cache, "ab", 0)
    with pytest.raises(SlotAccountingError, match="2 blocks are released, but nobody holds them"):
        cache.release(held)
    with pytest.raises(ValueError, match="2 blocks are inserted, the prefix cache has room for 1"):
        cache.insert(tokens_of("cc"), numbered(50, 2))
    with pytest.raises(ValueError, match=r"values of shape \(1, 3\) for 128 tokens, expected \(2, 3\)"):
        cache.insert(tokens_of("cc"), numbered(50, 1))
    cache.check_integrity()


def test_values_that_are_owned_twice_are_found() -> None:
    cache = new_cache()
    insert(cache, "ab", 0)
    insert(cache, "c", 0)
    with pytest.raises(SlotAccountingError, match="owned twice"):
        cache.check_integrity()


def test_a_block_takes_no_more_memory_than_planned() -> None:
    capacity = 20_000
    values = np.arange(64 * capacity).reshape(capacity, 64)
    tracemalloc.start()
    cache = BlockCache(capacity, 64)
    for number in range(capacity):
        held, _ = cache.insert(np.full(64, number, dtype=np.int32), values[number : number + 1])
        cache.release(held)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert cache.blocks == capacity
    assert taken <= capacity * BLOCK_BYTES, f"{taken / capacity} bytes a block"
