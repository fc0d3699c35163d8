"""Mixtures of experts."""

from typing import Any

import torch
import torch.nn.functional as F

from model.backends.device import fuses
from model.router import Router


class MixtureOfExperts:
    """The routed and the shared experts of a transformers module."""

    def __init__(self, module: Any) -> None:
        self._router = Router.of(module.gate)
        self._experts = module.experts
        self._shared = module.shared_experts
        self._numbers = torch.arange(module.experts.num_experts, device=module.experts.down_proj.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self._router.route(hidden)
        routed = self._grouped if fuses(hidden) else self._experts
        return routed(hidden, ids, weights) + self._shared(hidden)  # type: ignore[no-any-return]

    def _grouped(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed experts in bfloat16 on CUDA: what transformers computes, in fewer kernels.

        Pairs of a token and an expert are sorted by expert, and each projection is one grouped product over them.
        """
        expert_of, pairs = ids.flatten().sort()
        ends = torch.searchsorted(expert_of, self._numbers, right=True, out_int32=True)
        gate_up = F.grouped_mm(hidden[pairs // ids.shape[1]], self._experts.gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, dim=-1)
        down = F.grouped_mm(F.silu(gate) * up, self._experts.down_proj.transpose(1, 2), offs=ends)
        by_token = torch.empty_like(down)
        by_token[pairs] = down
        weighted = by_token.view(*ids.shape, -1) * weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden.dtype)
