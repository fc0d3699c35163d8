"""Which implementation of an operation a tensor gets, and sums that are completed by who reads them."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from kernels import ops, torch_ops
from kernels.fp8 import quantise_activations
from kernels.operands import Activations, BlockFp8, PartialSums, RmsNorm
from kernels.torch_ops import float32_product
from tests.kernels.fp8_cases import randn

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_is_chosen_yet() -> Iterator[None]:
    ops.ops_on.cache_clear()
    yield
    ops.ops_on.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_gets_torch(dtype: torch.dtype) -> None:
    assert ops.ops_for(torch.empty(2, dtype=dtype)) is torch_ops


@pytest.mark.parametrize("reason", [None, "needs a C compiler"])
def test_cuda_gets_triton_where_that_compiles(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = ModuleType("kernels.triton")
    monkeypatch.setitem(sys.modules, "kernels.triton", fused)
    monkeypatch.setattr("kernels.triton", fused, raising=False)
    monkeypatch.setattr(ops, "triton_unavailable_reason", lambda: reason)
    assert ops.ops_on(CUDA) is (torch_ops if reason else fused)


def test_float32_gets_torch_whatever_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "ops_on", lambda device: pytest.fail("asked for the device's operations"))
    assert ops.ops_for(torch.empty(2)) is torch_ops


def test_a_norm_in_plain_torch_quantises_into_room() -> None:
    hidden, norm = torch.randn(3, 256), RmsNorm(torch.ones(256), 1e-6)
    room = torch.empty(3, 256, dtype=torch.float8_e4m3fn), torch.empty(3, 2)
    summed, normed = torch_ops.add_rms_norm(hidden, hidden, norm, BlockFp8(True), room)
    values, scales = quantise_activations(normed.dense, True)
    assert torch.equal(summed, 2 * hidden)
    assert normed == Activations(normed.dense, *room)
    assert torch.equal(room[0].float(), values.float())
    assert torch.equal(room[1], scales)


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
