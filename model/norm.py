"""Normalisation of hidden states."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class RmsNorm:
    """By the root mean square (Zhang, Sennrich, arXiv:1910.07467). weight: [dim].

    Computed in float32 and rounded once, where transformers rounds before it applies the weight, too.
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    """By mean and variance (Ba, Kiros, Hinton, arXiv:1607.06450). weight, bias: [dim]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
