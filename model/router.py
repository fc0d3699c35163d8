"""Chooses the experts that compute a token (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from model.backends.device import fuses


@dataclass(frozen=True)
class Router:
    """The router of one mixture of experts.

    weight: [experts, hidden_size]. bias: float32 [experts], added to the scores for the choice and not for the weights.
    groups: the number of groups of equal size that the experts are in. A token chooses among the experts of the
    `top_groups` best groups, by the sum of their two best experts. normalise: a token's weights are divided by their
    sum before they are multiplied by `scale`.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    top_k: int
    groups: int
    top_groups: int
    normalise: bool
    scale: float

    @classmethod
    def of(cls, module: Any) -> "Router":
        """The router of a transformers module."""
        return cls(
            weight=module.weight,
            bias=module.e_score_correction_bias,
            top_k=module.top_k,
            groups=module.num_group,
            top_groups=module.topk_group,
            normalise=module.norm_topk_prob,
            scale=module.routed_scaling_factor,
        )

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and ids, int64, of the experts of hidden states [N, hidden_size], both [N, top_k]."""
        if fuses(hidden) and self.weight.dtype == hidden.dtype:
            # Here, since a machine without a GPU need not have Triton.
            from model.backends.triton_choose import choose_experts

            # Products of bfloat16 numbers are exact in float32, so the factors need not be converted first.
            logits = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
            return choose_experts(logits, self)
        return self.choose(F.linear(hidden.float(), self.weight.float()))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`route` from float32 logits [N, experts]."""
        scores = logits.sigmoid()
        ranked = scores + self.bias
        if self.groups > 1:
            grouped = ranked.view(len(ranked), self.groups, -1)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1, sorted=False).indices
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            ranked = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
        ids = ranked.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, ids
