"""Linear maps, whose weights are in the network's dtype or in block-fp8, and where tensors of a network come from."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.fp8 import BLOCK, FP8, MAX, blocks
from kernels.operands import Activations, BlockFp8, SwiGluWeights
from kernels.ops import ops_for


@dataclass(frozen=True)
class Linear:
    """A linear map without bias, or a stack of them, such as one for each expert.

    weight: [..., out, in]. scales: of a weight in float8_e4m3, float32 [..., ceil(out / 128), ceil(in / 128)]; None for
    other types. power_of_two: the scales of activations are rounded up to powers of two.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    power_of_two: bool = False

    @property
    def fp8(self) -> BlockFp8 | None:
        """How activations are to be quantised; None if the map computes in the network's dtype."""
        return None if self.scales is None else BlockFp8(self.power_of_two)

    def __getitem__(self, number: int) -> "Linear":
        """One of a stack."""
        return Linear(self.weight[number], None if self.scales is None else self.scales[number], self.power_of_two)

    def __call__(self, x: torch.Tensor | Activations) -> torch.Tensor:
        """x: [N, in]. Returns [N, out]."""
        product = self.forward_split_k(x)
        return product if self.scales is None else ops_for(given(x).dense).reduce_fp8(product)

    def forward_split_k(self, x: torch.Tensor | Activations) -> torch.Tensor:
        """The map for a reader that adds up: [N, out], or float32 [parts, N, out], whose sum over the parts, in order
        and rounded, it is."""
        x = given(x)
        if self.scales is None:
            return F.linear(x.dense, self.weight)
        return ops_for(x.dense).linear_fp8(*quantised(x, self.power_of_two), self.weight, self.scales)


def swiglu_weights(gate_up: Linear, down: Linear, first: int = 0) -> SwiGluWeights:
    """Of maps in block-fp8."""
    assert gate_up.scales is not None, "in block-fp8"
    assert down.scales is not None, "as gate_up is"
    return SwiGluWeights(gate_up.weight, gate_up.scales, down.weight, down.scales, gate_up.power_of_two, first)


def given(x: torch.Tensor | Activations) -> Activations:
    return Activations(x) if isinstance(x, torch.Tensor) else x


def quantised(x: Activations, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales, computed here unless they are known."""
    if x.values is not None and x.scales is not None:
        return x.values, x.scales
    return ops_for(x.dense).quantise(x.dense, power_of_two)


Parts = Mapping[str, int]
"""Published weights that make one, row after row: names, without `.weight`, and the rows of each."""


FP8_COLUMNS = 16
"""Kernels take multiples of so many columns."""


class Weights(ABC):
    """Makes the tensors of a network, once each, by their published names.

    device, dtype: of the tensors. The weights of linear maps may be in block-fp8 instead.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.num_bytes = 0
        """Of all tensors so far."""

    @abstractmethod
    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in the network's dtype, or another one. What is published in block-fp8 is dequantised."""

    def unrounded(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor that loses nothing to the network's dtype: float32, or bfloat16 if it is stored so."""
        return self.tensor(name, shape, torch.float32)

    def linear(self, parts: Parts, columns: int) -> Linear:
        """The linear map that computes what all parts compute, [sum of rows, columns]."""
        return self.stack([parts], columns)[0]

    @abstractmethod
    def stack(self, maps: Sequence[Parts], columns: int, multiple: int = FP8_COLUMNS) -> Linear:
        """Linear maps of one shape behind each other, [maps, sum of rows, columns].

        multiple: of which `columns` must be one for block-fp8.
        """

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.num_bytes += made.nbytes
        return made

    def _empty_scales(self, weight: torch.Tensor) -> torch.Tensor:
        *stack, rows, columns = weight.shape
        return self._empty((*stack, blocks(rows), blocks(columns)), torch.float32)


def can_be_fp8(parts: Parts, columns: int, multiple: int) -> bool:
    """Whether the parts make one weight in block-fp8: only the last may end within a block."""
    *others, _ = parts.values()
    return columns % multiple == 0 and all(rows % BLOCK == 0 for rows in others)


class RandomWeights(Weights):
    """Random weights made on the device, the same on every device of a kind, to measure without a checkpoint.

    fp8: linear maps are in block-fp8. Weights have the standard deviation of `initializer_range` in published
    configurations; weights of norms are 1.
    """

    _DEVIATION = 0.02

    def __init__(self, device: torch.device, dtype: torch.dtype, fp8: BlockFp8 | None = None) -> None:
        super().__init__(device, dtype)
        self._fp8 = fp8
        self._generator = torch.Generator(device if device.type != "meta" else "cpu").manual_seed(0)

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        made = self._empty(shape, dtype or self.dtype)
        if name.endswith("norm.weight"):
            return made.fill_(1)
        if name.endswith("bias"):
            return made.zero_()
        return self._drawn(made, self._DEVIATION)

    def unrounded(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """In the network's dtype, in which published checkpoints store them."""
        return self.tensor(name, shape)

    def stack(self, maps: Sequence[Parts], columns: int, multiple: int = FP8_COLUMNS) -> Linear:
        shape = (len(maps), sum(maps[0].values()), columns)
        if self._fp8 is None or not can_be_fp8(maps[0], columns, multiple):
            return Linear(self._drawn(self._empty(shape, self.dtype), self._DEVIATION))
        weight = self._empty(shape, FP8)
        deviation = MAX / 8
        scale = 2.0 ** round(math.log2(self._DEVIATION / deviation))
        for one in weight:  # as drawn, they take two to four times as many bytes
            one.copy_(self._drawn(torch.empty(one.shape, dtype=torch.bfloat16, device=self.device), deviation))
        return Linear(weight, self._empty_scales(weight).fill_(scale), self._fp8.power_of_two)

    def _drawn(self, made: torch.Tensor, deviation: float) -> torch.Tensor:
        return made if made.device.type == "meta" else made.normal_(0, deviation, generator=self._generator)
