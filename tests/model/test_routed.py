"""Rows of bytes that hold quantised tokens and the experts that they chose."""

import pytest
import torch

from kernels.fp8 import quantise_activations
from model.shard import RoutedTokens
from tests.kernels.fp8_cases import randn

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
