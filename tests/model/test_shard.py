"""Which experts and tokens the processes of a group compute, and rows of bytes that hold quantised tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.fp8 import quantise_activations
from model.shard import SINGLE_RANK, RoutedTokens, Shard
from tests.kernels.fp8_cases import randn


def test_one_process_computes_everything() -> None:
    assert Shard(0, 1) == SINGLE_RANK
    assert list(SINGLE_RANK.experts(256)) == list(range(256))
    assert list(SINGLE_RANK.tokens(7)) == list(range(7))


@given(st.integers(1, 16), st.integers(0, 100))
def test_every_token_of_a_chunk_is_computed_once_in_blocks_about_equal(of: int, count: int) -> None:
    blocks = [Shard(rank, of).tokens(count) for rank in range(of)]
    assert [token for block in blocks for token in block] == list(range(count))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@given(st.integers(1, 8), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_blocks_of_several_chunks_are_those_of_all_their_tokens(of: int, lengths: list[int]) -> None:
    computed = [
        (number, token) for rank in range(of) for number, tokens in Shard(rank, of).blocks(lengths) for token in tokens
    ]
    assert computed == [(number, token) for number, length in enumerate(lengths) for token in range(length)]
    most = Shard(0, of).most_tokens(sum(lengths))
    sizes = [sum(len(tokens) for _, tokens in Shard(rank, of).blocks(lengths)) for rank in range(of)]
    assert max(sizes) == most
    assert min(sizes) >= most - 1


def test_every_expert_has_one_owner() -> None:
    owned = [Shard(rank, 8).experts(256) for rank in range(8)]
    assert [expert for part in owned for expert in part] == list(range(256))
    assert {len(part) for part in owned} == {32}


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 experts cannot be divided among 4 processes"):
        Shard(0, 4).experts(6)


@pytest.mark.parametrize(("rank", "of"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_outside_of_its_group_is_refused(rank: int, of: int) -> None:
    with pytest.raises(ValueError, match=f"shard {rank} of {of}"):
        Shard(rank, of)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("hidden_size", "top_k", "row_bytes"), [(7168, 8, 7552), (6144, 8, 6400), (272, 3, 384), (64, 1, 128)]
)
def test_what_is_written_into_a_row_lies_there_without_gaps(hidden_size: int, top_k: int, row_bytes: int) -> None:
    tokens = RoutedTokens.empty(5, hidden_size, top_k, CPU)
    assert tokens.rows.shape == (5, row_bytes)
    values, scales = quantise_activations(randn(5, hidden_size), power_of_two=True)
    ids = torch.arange(5 * top_k, dtype=torch.int32).view(5, top_k)
    weights = randn(5, top_k)
    for room, written in zip((*tokens.quantised, *tokens.choice), (values, scales, weights, ids), strict=True):
        assert room.stride(0) * room.itemsize == row_bytes
        room.copy_(written)
    expected = torch.cat([part.contiguous().view(torch.uint8) for part in (values, scales, ids, weights)], 1)
    assert torch.equal(tokens.rows[:, : expected.shape[1]], expected)
    some = tokens[2:4]
    assert len(some) == 2
    some.ids.fill_(7)
    assert tokens.ids.eq(7).all(1).tolist() == [False, False, True, True, False], "the same memory"
