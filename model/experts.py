"""Feed-forward layers: dense ones, and mixtures of experts."""

from collections.abc import Callable
from typing import Any

import torch

from model.router import Router

FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""From normed hidden states [N, hidden_size] to what is added to the hidden states."""


def feed_forward(module: Any) -> FeedForward:
    """That of one transformers decoder layer."""
    return MixtureOfExperts(module) if hasattr(module, "experts") else module


class MixtureOfExperts:
    """The routed and the shared experts of one transformers module."""

    def __init__(self, module: Any) -> None:
        self._router = Router.of(module.gate)
        self._experts = module.experts
        self._shared = module.shared_experts

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self._router.route(hidden)
        return self._experts(hidden, ids, weights) + self._shared(hidden)  # type: ignore[no-any-return]
