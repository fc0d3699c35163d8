"""The gateway's picture of nodes' caches: updates in any order and number, bounds, restarts."""

import numpy as np
import numpy.typing as npt

from base.block_hashes import BlockHashes, block_hashes
from control.messages import CacheUpdate
from gateway.prefix_routing import PrefixIndex

NOTHING: BlockHashes = np.empty(0, dtype=np.uint64)


def prompt(number: int, blocks: int) -> npt.NDArray[np.int32]:
    """Prompts with different numbers share nothing."""
    return np.full(64 * blocks, number, dtype=np.int32)


def names(number: int, blocks: int) -> BlockHashes:
    return block_hashes(prompt(number, blocks))


def gained(serial: int, hashes: BlockHashes, whole: bool = False) -> CacheUpdate:
    return CacheUpdate.of(serial, hashes, NOTHING, whole)


def test_a_prompt_is_matched_in_each_node_up_to_the_first_block_that_is_missing() -> None:
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


def test_a_gateway_that_restarted_knows_no_serial_and_a_node_that_restarted_begins_with_nothing() -> None:
    index = PrefixIndex(100)
    index.apply("boot 1", gained(17, names(1, 1)))
    assert index.serial("boot 1") == 0
    index.apply("boot 1", gained(18, names(1, 4), whole=True))
    index.apply("boot 2", gained(1, NOTHING))
    assert (index.serial("boot 1"), index.serial("boot 2")) == (18, 1)
    assert index.matched(names(1, 4)) == {"boot 1": 256, "boot 2": 0}


def test_the_blocks_that_were_used_longest_ago_are_dropped_first_and_ends_before_beginnings() -> None:
    index = PrefixIndex(max_blocks=8)
    index.apply("one", gained(1, names(1, 4)))
    index.apply("one", gained(2, names(2, 4)))
    index.matched(names(1, 4))
    index.apply("one", gained(3, names(3, 2)))
    assert index.blocks("one") == 8
    assert [index.matched(names(number, 4))["one"] for number in (1, 2, 3)] == [256, 128, 128]
    index.apply("one", gained(4, names(4, 50), whole=True))
    assert index.matched(names(4, 50)) == {"one": 8 * 64}
