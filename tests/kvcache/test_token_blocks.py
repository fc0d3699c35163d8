"""Packed blocks are equal exactly if their token ids are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.block_hashes import BLOCK_TOKENS
from kvcache.token_blocks import TokenPacking


@pytest.mark.parametrize(("vocab_size", "block_bytes"), [(256, 128), (2**16, 128), (129_280, 136), (154_880, 144)])
def test_a_block_takes_as_many_bits_as_the_vocabulary_needs(vocab_size: int, block_bytes: int) -> None:
    assert TokenPacking(vocab_size).block_bytes == block_bytes


@settings(max_examples=100)
@given(st.integers(1, 2**31), st.integers(0, BLOCK_TOKENS - 1), st.data())
def test_one_other_token_makes_another_block(vocab_size: int, place: int, data: st.DataObject) -> None:
    packing = TokenPacking(vocab_size)
    one, other = (data.draw(st.integers(0, vocab_size - 1)) for _ in range(2))
    tokens = np.arange(2 * BLOCK_TOKENS, dtype=np.int64) % vocab_size
    tokens[BLOCK_TOKENS:] = tokens[:BLOCK_TOKENS]
    tokens[place], tokens[BLOCK_TOKENS + place] = one, other
    first, second = packing.pack(tokens)
    assert (first == second).all() == (one == other)


def test_only_whole_blocks_are_packed() -> None:
    packing = TokenPacking(1000)
    tokens = np.arange(200, dtype=np.int32)
    assert packing.pack(tokens[:63]).shape == (0, packing.words)
    np.testing.assert_array_equal(packing.pack(tokens), packing.pack(tokens[:192]))


@pytest.mark.parametrize("wrong", [-1, 1000, 2**31 - 1])
def test_ids_outside_of_the_vocabulary_are_refused(wrong: int) -> None:
    tokens = np.zeros(128, dtype=np.int32)
    tokens[70] = wrong
    with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary of 1000 tokens"):
        TokenPacking(1000).pack(tokens)
