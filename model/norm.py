"""Normalisation by the root mean square of a hidden state (Zhang, Sennrich, arXiv:1910.07467)."""

from typing import Any

import torch
import torch.nn.functional as F


class RMSNorm:
    """The norm of one transformers module, which writes out in seven operations what torch has as one kernel.

    Computed in float32 and rounded once, where transformers rounds before it applies the weight, too.
    """

    def __init__(self, module: Any) -> None:
        self._weight: torch.Tensor = module.weight
        self._eps: float = module.variance_epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim]."""
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
