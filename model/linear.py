"""Linear maps whose weights are in the network's dtype or in block-fp8, and what they are applied to."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.quantization import BlockFp8


@dataclass(frozen=True)
class Activations:
    """The input of linear maps: [N, in] in the network's dtype, and in block-fp8 if somebody has quantised it.

    values: float8_e4m3 [N, in]. scales: float32 [N, ceil(in / 128)] with strides (1, N). Both as
    `model.fp8.quantise_activations` says. If they lie in wider rows (`model.routed.RoutedTokens`), linear maps do not
    take them.
    """

    dense: torch.Tensor
    values: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def quantised(self, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales, computed here if nobody has before."""
        if self.values is not None and self.scales is not None:
            return self.values, self.scales
        # Here, since a machine without a GPU need not have Triton.
        from model.backends.triton_fp8 import quantise

        return quantise(self.dense, power_of_two)


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
        product = self.in_parts(x)
        if product.dim() == 2:
            return product
        # Here, since a machine without a GPU need not have Triton.
        from model.backends.triton_fp8_linear import reduced

        return reduced(product)

    def in_parts(self, x: torch.Tensor | Activations) -> torch.Tensor:
        """The map for a reader that adds up: [N, out], or float32 [parts, N, out], whose sum over the parts, in order
        and rounded, it is."""
        given = Activations(x) if isinstance(x, torch.Tensor) else x
        if self.scales is None:
            return F.linear(given.dense, self.weight)
        from model.backends.triton_fp8_linear import linear_in_parts

        return linear_in_parts(*given.quantised(self.power_of_two), self.weight, self.scales)
