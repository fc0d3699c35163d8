"""The prefix tree: exactly the longest cached prefix, the oldest blocks first, nothing lost and nothing owned twice."""

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from base.block_hashes import BLOCK_TOKENS
from kvcache.child_table import ChildTable
from kvcache.extents import SlotAccountingError
from kvcache.prefix_results import PrefixMatch
from kvcache.prefix_tree import PrefixTree
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


def new_tree(capacity: int = 32) -> PrefixTree:
    return PrefixTree(capacity, WIDTH, VOCAB)


# Against the model


@dataclass
class _Held:
    match: PrefixMatch
    salt: str
    names: tuple[str, ...]


class _Walk:
    """Random requests against a tree and the model, with a pool of values that both sides own in turn."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.capacity = self.random.choice((4, 12, 40, 90))
        self.tree = new_tree(self.capacity)
        self.model = PrefixModel()
        self.free = [tuple(row) for row in numbered(0, self.capacity + 8).tolist()]
        self.held: list[_Held] = []

    def step(self) -> None:
        salt = self.random.choice(("", "", "", "tenant"))
        names = tuple(self.random.choice("aaabcd") for _ in range(self.random.randrange(9)))
        act = self.random.choice((self.look_up, self.insert, self.insert, self.release, self.release, self.evict))
        act(salt, names)
        assert self.tree.blocks == len(self.model.blocks)
        assert self.tree.evictable_blocks == self.model.evictable

    def look_up(self, salt: str, names: tuple[str, ...]) -> None:
        match = self.tree.lookup(tokens_of("".join(names), self.random.randrange(BLOCK_TOKENS)), salt)
        assert [tuple(row) for row in match.values.tolist()] == self.model.lookup(salt, names)
        self._perhaps_hold(match, salt, names[: match.blocks])

    def insert(self, salt: str, names: tuple[str, ...]) -> None:
        """As a node does: hold what is there, make room for the rest, insert, free the duplicates, let go."""
        match = self.tree.lookup(tokens_of("".join(names)), salt)
        known = self.model.lookup(salt, names)
        self.tree.retain(match)
        self.model.retain(salt, names[: len(known)])
        self._evict(len(names) - len(known) - (self.capacity - self.tree.blocks))
        room = self.capacity - self.tree.blocks
        names = names[: len(known) + min(room, len(self.free))]
        # Some blocks that are there are computed again, as when two requests with one prompt come at once.
        shared = self.random.randint(0, len(known)) if len(self.free) >= len(names) else len(known)
        taken = [self.free.pop() for _ in range(len(names) - shared)]
        given = known[:shared] + taken
        inserted = self.tree.insert(
            tokens_of("".join(names), self.random.randrange(BLOCK_TOKENS)),
            np.array(given, dtype=np.int64).reshape(-1, WIDTH),
            salt,
        )
        self.model.insert(salt, names, given)
        assert inserted.present == len(known)
        assert [tuple(row) for row in inserted.match.values.tolist()] == known + given[len(known) :]
        assert inserted.is_duplicate.tolist() == [shared <= i < len(known) for i in range(len(names))]
        self.free += [values for values, gone in zip(given, inserted.is_duplicate, strict=True) if gone]
        self._perhaps_hold(inserted.match, salt, names)
        self.tree.release(match)
        self.model.release(salt, names[: len(known)])

    def release(self, salt: str, names: tuple[str, ...]) -> None:
        if self.held:
            held = self.held.pop(self.random.randrange(len(self.held)))
            self.tree.release(held.match)
            self.model.release(held.salt, held.names)

    def evict(self, salt: str, names: tuple[str, ...]) -> None:
        self._evict(len(names))

    def finish(self) -> None:
        """Without requests and with the cache dropped, everything is free."""
        while self.held:
            self.release("", ())
        self.tree.check_integrity()
        self._evict(self.tree.blocks)
        assert self.tree.blocks == self.tree.evictable_blocks == self.tree.num_nodes == 0
        assert sorted(self.free) == [tuple(row) for row in numbered(0, self.capacity + 8).tolist()]

    def _evict(self, count: int) -> None:
        gone = [tuple(row) for row in self.tree.evict(count).values.tolist()]
        assert gone == self.model.evict(count)
        self.free += gone

    def _perhaps_hold(self, match: PrefixMatch, salt: str, names: tuple[str, ...]) -> None:
        if self.random.random() < 0.4 and len(self.held) < 12:
            self.tree.retain(match)
            self.model.retain(salt, names)
            self.held.append(_Held(match, salt, names))


def _walk(seed: int, prompts: int = 250) -> None:
    walk = _Walk(seed)
    for prompt in range(prompts):
        walk.step()
        if prompt % 25 == 0:
            walk.tree.check_integrity()
    walk.finish()


@pytest.mark.parametrize("prompts", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_prompts_get_what_a_dictionary_says(prompts: int) -> None:
    for seed in range(prompts // 250):
        _walk(seed)


def test_token_ids_decide_where_all_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChildTable, "_hash", lambda *_: 0)
    for seed in range(4):
        _walk(seed)


# By hand


def test_a_match_is_the_longest_prefix_in_whole_blocks() -> None:
    tree = new_tree()
    tree.insert(tokens_of("abc", rest=63), numbered(0, 3))
    assert tree.lookup(tokens_of("abca")).tokens == 192
    assert tree.lookup(tokens_of("abd")).blocks == 2
    assert tree.lookup(tokens_of("ab", rest=63)).blocks == 2
    assert tree.lookup(tokens_of("", rest=63)).blocks == 0
    assert tree.lookup(tokens_of("b")).blocks == 0
    np.testing.assert_array_equal(tree.lookup(tokens_of("ab")).values, numbered(0, 2))


def test_salts_share_nothing() -> None:
    tree = new_tree()
    tree.insert(tokens_of("ab"), numbered(0, 2), salt="one")
    assert tree.lookup(tokens_of("ab")).blocks == tree.lookup(tokens_of("ab"), salt="two").blocks == 0
    tree.insert(tokens_of("ab"), numbered(100, 2), salt="two")
    np.testing.assert_array_equal(tree.lookup(tokens_of("ab"), salt="one").values, numbered(0, 2))
    np.testing.assert_array_equal(tree.lookup(tokens_of("ab"), salt="two").values, numbered(100, 2))


def test_salts_without_blocks_are_forgotten() -> None:
    tree = new_tree()
    for number in range(100):
        tree.insert(tokens_of("ab"), numbered(0, 2), salt=str(number))
        tree.evict(2)
    assert tree._roots.children() == {}
    tree.insert(tokens_of("a"), numbered(0, 1), salt="one")
    tree.insert(tokens_of("a"), numbered(9, 1), salt="two")
    assert sorted(tree._roots.children()) == [-2, -1], "numbers of roots are used again"


def test_duplicates_stay_the_callers() -> None:
    tree = new_tree()
    tree.insert(tokens_of("ab"), numbered(0, 2))
    given = np.concatenate([numbered(0, 1), numbered(100, 2)])
    inserted = tree.insert(tokens_of("abc"), given)
    assert inserted.present == 2
    assert inserted.is_duplicate.tolist() == [False, True, False]
    np.testing.assert_array_equal(inserted.match.values, np.concatenate([numbered(0, 2), numbered(103, 1)]))


def test_the_end_of_the_oldest_leaf_goes_first_and_what_was_looked_up_stays() -> None:
    tree = new_tree()
    tree.insert(tokens_of("aabb"), numbered(0, 4))
    tree.insert(tokens_of("cc"), numbered(100, 2))
    tree.lookup(tokens_of("aa"))
    assert tree.evict(3).values[:, 0].tolist() == [9, 6, 103]
    assert tree.lookup(tokens_of("aabb")).blocks == 2
    assert tree.lookup(tokens_of("cc")).blocks == 1


def test_hashes_return_with_the_blocks_that_they_were_given_for() -> None:
    tree = new_tree()
    tree.insert(tokens_of("ab"), numbered(0, 2), hashes=np.array([11, 2**64 - 1], dtype=np.uint64))
    tree.insert(tokens_of("abc"), numbered(0, 3), hashes=np.array([0, 0, 33], dtype=np.uint64))
    assert tree.evict(3).hashes.tolist() == [33, 2**64 - 1, 11]


def test_the_newest_hashes_are_those_of_held_blocks_and_then_of_what_was_used_last() -> None:
    tree = new_tree()
    for number, names in enumerate(("aa", "bb", "cc")):
        hashes = np.array([10 * number, 10 * number + 1], dtype=np.uint64)
        match = tree.insert(tokens_of(names), numbered(6 * number, 2), hashes=hashes).match
        if names == "aa":
            tree.retain(match)
    assert tree.newest_hashes(99).tolist() == [0, 1, 20, 21, 10, 11]
    assert tree.newest_hashes(5).tolist() == [0, 1, 20, 21, 10]
    assert new_tree().newest_hashes(5).tolist() == []


def test_held_blocks_are_never_evicted_and_not_counted_as_evictable() -> None:
    tree = new_tree()
    tree.insert(tokens_of("abcd"), numbered(0, 4))
    two, four = tree.lookup(tokens_of("ab")), tree.lookup(tokens_of("abcd"))
    tree.retain(two)
    assert (tree.blocks, tree.held_blocks, tree.evictable_blocks) == (4, 2, 2)
    tree.retain(four)
    assert tree.evictable_blocks == 0
    assert len(tree.evict(4).values) == 0
    tree.release(two)
    assert tree.evictable_blocks == 0
    tree.release(four)
    assert tree.evictable_blocks == 4


def test_a_match_survives_cuts_of_its_nodes_while_it_is_held() -> None:
    tree = new_tree()
    held = tree.insert(tokens_of("aaaa"), numbered(0, 4)).match
    tree.retain(held)
    tree.insert(tokens_of("aab"), np.concatenate([numbered(0, 2), numbered(100, 1)]))
    tree.lookup(tokens_of("a"))
    assert tree.num_nodes == 4
    assert tree.evict(9).values[:, 0].tolist() == [100]
    tree.release(held)
    assert tree.evictable_blocks == 4
    tree.check_integrity()


def test_wrong_use_is_refused() -> None:
    tree = new_tree(capacity=3)
    match = tree.insert(tokens_of("ab"), numbered(0, 2)).match
    with pytest.raises(SlotAccountingError, match="2 blocks is released, but nobody holds it"):
        tree.release(match)
    with pytest.raises(ValueError, match="2 blocks are inserted, the prefix cache has room for 1"):
        tree.insert(tokens_of("cc"), numbered(50, 2))
    with pytest.raises(ValueError, match=r"values of shape \(1, 3\) for 128 tokens, expected \(2, 3\)"):
        tree.insert(tokens_of("cc"), numbered(50, 1))
    tree.evict(1)
    with pytest.raises(SlotAccountingError, match="after an eviction"):
        tree.retain(match)
    with pytest.raises(ValueError, match="at least 1"):
        new_tree(capacity=0)
    tree.check_integrity()


def test_values_that_are_owned_twice_are_found() -> None:
    tree = new_tree()
    tree.insert(tokens_of("ab"), numbered(0, 2))
    tree.insert(tokens_of("c"), numbered(0, 1))
    with pytest.raises(SlotAccountingError, match="owned twice"):
        tree.check_integrity()


@pytest.mark.parametrize("vocab_size", [1000, 129_280, 154_880, 2**18])
@pytest.mark.parametrize("capacity", [64, 1000, 65_536])
def test_bookkeeping_is_at_most_200_bytes_a_block_even_for_blocks_that_share_nothing(
    vocab_size: int, capacity: int
) -> None:
    tree = PrefixTree(capacity, 64, vocab_size)
    assert tree.bookkeeping_bytes <= 200 * capacity + 16
    prompts = min(capacity, 1000)
    for number in range(prompts):
        tree.insert(np.full(64, number, dtype=np.int32), np.full((1, 64), number))
    assert tree.num_nodes == prompts
    assert tree.bookkeeping_bytes <= 200 * capacity + 16
