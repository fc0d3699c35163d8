"""Linear maps whose weights are in the network's dtype or in block-fp8."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Linear:
    """A linear map without bias, or a stack of them, such as one for each expert.

    weight: [..., out, in]. scales: of a weight in float8_e4m3, float32 [..., ceil(out / 128), ceil(in / 128)]; None for
    other types. power_of_two: the scales of activations are rounded up to powers of two.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    power_of_two: bool = False

    def __getitem__(self, number: int) -> "Linear":
        """One of a stack."""
        return Linear(self.weight[number], None if self.scales is None else self.scales[number], self.power_of_two)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, in]. Returns [N, out]."""
        if self.scales is None:
            return F.linear(x, self.weight)
        # Here, since a machine without a GPU need not have Triton.
        from model.backends.triton_fp8_linear import linear

        return linear(x, self.weight, self.scales, self.power_of_two)
