"""Normalisation by the root mean square of a hidden state (Zhang, Sennrich, arXiv:1910.07467)."""

from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, module: Any) -> torch.Tensor:
    """x, [..., dim], normed as by a transformers module, which writes out in seven operations what torch has as one.

    Computed in float32 and rounded once, where transformers rounds before it applies the weight, too.
    """
    return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
