"""Sums that are completed by who reads them, and the kernels that make and read them."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernels.operands import PartialSums
from kernels.torch_ops import float32_product
from model.checkpoint import StoredTensor
from model.stored_weights import StoredWeights
from model.weights import RandomWeights
from tests.model.fp8_cases import randn
from tests.model.interpreting import assert_passes_in_interpreter

CPU = torch.device("cpu")


def test_parts_are_added_up_and_scaled() -> None:
    parts = randn(3, 5, 4)
    sums = PartialSums(parts, 0.5)
    assert torch.equal(sums.reduce(), parts.sum(0) * 0.5)
    assert torch.equal(sums[1:3].reduce(), sums.reduce()[1:3])
    assert torch.equal(PartialSums.of(parts[0]).reduce(), parts[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_multiplies_in_float32(dtype: torch.dtype) -> None:
    x, weight = randn(3, 40).to(dtype), randn(8, 40, seed=1).to(dtype)
    assert torch.equal(float32_product(x, weight, 0.25).reduce(), F.linear(x.float(), weight.float()) * 0.25)


@pytest.mark.parametrize(
    ("stored", "served", "kept"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_head_weights_are_not_rounded(stored: torch.dtype, served: torch.dtype, kept: torch.dtype) -> None:
    held = StoredTensor("weights_proj", Path("file"), 0, stored, (4, 8))
    weights = StoredWeights({"weights_proj": held}, torch.device("meta"), served)
    assert weights.unrounded("weights_proj", (4, 8)).dtype == kept
    assert RandomWeights(CPU, served).unrounded("weights_proj", (4, 8)).dtype == served


if importlib.util.find_spec("triton"):

    def test_the_kernels_compute_the_same_in_tritons_interpreter() -> None:
        assert_passes_in_interpreter("interpreted_small_kernels.py")
