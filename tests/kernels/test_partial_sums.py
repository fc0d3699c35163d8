"""Sums that are completed by who reads them."""

import pytest
import torch
import torch.nn.functional as F

from kernels.operands import PartialSums
from kernels.torch_ops import float32_product
from tests.kernels.fp8_cases import randn


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
