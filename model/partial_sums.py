"""Sums that whoever reads them completes, so that completing them takes no kernel of its own."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.backends.device import fuses

MOST_TOKENS = 128
"""So many tokens are multiplied by the kernel of few rows. For more of them there is more arithmetic than reading."""


@dataclass(frozen=True)
class PartialSums:
    """Numbers [N, columns]: `scale` times the sum of `parts`, float32 [parts, N, columns], over the first dimension."""

    parts: torch.Tensor
    scale: float = 1.0

    @classmethod
    def of(cls, numbers: torch.Tensor) -> "PartialSums":
        """Numbers that are complete, float32 [N, columns]."""
        return cls(numbers.unsqueeze(0))

    def __getitem__(self, tokens: slice) -> "PartialSums":
        """Those of some of the tokens."""
        return PartialSums(self.parts[:, tokens], self.scale)

    def whole(self) -> torch.Tensor:
        """The numbers, float32 [N, columns]."""
        total = self.parts[0] if len(self.parts) == 1 else self.parts.sum(0)
        return total if self.scale == 1.0 else total * self.scale


def float32_product(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> PartialSums:
    """`scale` times x, [N, K], times the transpose of a weight of few rows, [M, K], with products and sums in float32.

    weight: contiguous, of the type of x or float32. In bfloat16 on CUDA the factors are not converted, since products
    of bfloat16 numbers are exact in float32.
    """
    if fuses(x):
        if len(x) <= MOST_TOKENS:
            # Here, since a machine without a GPU need not have Triton.
            from model.backends.triton_few_rows import partial_products

            return PartialSums(partial_products(x, weight), scale)
        if weight.dtype == x.dtype:
            return PartialSums(torch.mm(x, weight.t(), out_dtype=torch.float32).unsqueeze(0), scale)
    return PartialSums(F.linear(x.float(), weight.float()).unsqueeze(0), scale)
