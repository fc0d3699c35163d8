"""Kernels of block-fp8 weights on activations that are not quantised yet, as `kernels.fp8` takes them."""

import torch

from kernels.operands import SwiGluWeights
from kernels.triton import experts_fp8, linear_fp8, mlp_fp8, quantise, reduce_fp8


def linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    return reduce_fp8(linear_fp8(*quantise(x, power_of_two), weight, scales))


def mlp(x: torch.Tensor, weights: SwiGluWeights) -> torch.Tensor:
    return mlp_fp8(*quantise(x, weights.power_of_two), weights)


def experts(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, of: SwiGluWeights, shared: range | None = None
) -> torch.Tensor:
    return experts_fp8(*quantise(hidden, of.power_of_two), ids, weights, of, shared)
