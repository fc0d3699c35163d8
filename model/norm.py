"""Normalisation of hidden states, of which the one by the root mean square adds and quantises on the way."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.backends.device import fuses
from model.linear import Activations
from model.quantization import BlockFp8


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

    def input_of(self, x: torch.Tensor, fp8: BlockFp8 | None) -> Activations:
        """The norm of x [N, dim] as the input of linear maps that compute in block-fp8, or not."""
        return self.of_sum(x, None, fp8)[1]

    def of_sum(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        fp8: BlockFp8 | None = None,
        room: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, Activations]:
        """hidden + addend, rounded, and the norm of that, all [N, dim]; the addend None stands for zeros.

        addend: [N, dim], or what `Linear.in_parts` returned, which is added up here. fp8: the norm is quantised, too,
        for linear maps that compute in block-fp8; as their kernels do, this one needs Triton then. room: where values
        and scales are to be written; None: new tensors.
        """
        if fp8 is not None or fuses(hidden):
            # Here, since a machine without a GPU need not have Triton.
            from model.backends.triton_norm import rms_norm

            return rms_norm(hidden, addend, self.weight, self.eps, fp8, room)
        if addend is not None:
            hidden = hidden + addend
        return hidden, Activations(self(hidden))


@dataclass(frozen=True)
class LayerNorm:
    """By mean and variance (Ba, Kiros, Hinton, arXiv:1607.06450). weight, bias: [dim]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
