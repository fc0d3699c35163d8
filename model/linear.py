"""Linear maps whose weights are in the network's dtype or in block-fp8."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.dispatch import ops_for
from kernels.operands import Activations, BlockFp8, SwiGluWeights


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
