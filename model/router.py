"""Chooses the experts that compute a token (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

from dataclasses import dataclass

import torch

from model.backends.device import fuses
from model.config import RouterConfig
from model.partial_sums import float32_product
from model.weights import Weights


@dataclass(frozen=True)
class Router:
    """The router of one mixture of experts.

    weight: [experts, hidden_size]. bias: float32 [experts], added to the scores for the choice and not for the weights.
    A token chooses `top_k` among the experts of the `top_groups` best of `groups` groups of equal size, by the sum of
    their two best experts. If `normalise`, its weights are divided by their sum before they are multiplied by `scale`.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    config: RouterConfig

    @classmethod
    def load(cls, weights: Weights, name: str, hidden_size: int, config: RouterConfig) -> "Router":
        """The router of that name, such as `model.layers.3.mlp.gate`."""
        return cls(
            weight=weights.tensor(f"{name}.weight", (config.experts, hidden_size)),
            bias=weights.tensor(f"{name}.e_score_correction_bias", (config.experts,), torch.float32),
            config=config,
        )

    def route(
        self, hidden: torch.Tensor, room: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and ids, int64, of the experts of hidden states [N, hidden_size], both [N, top_k].

        room: where a Triton kernel is to write both, ids in int32 or int64; None: new tensors.
        """
        logits = float32_product(hidden, self.weight)
        if room is not None or fuses(hidden):
            # Here, since a machine without a GPU need not have Triton.
            from model.backends.triton_choose import choose_experts

            return choose_experts(logits, self.bias, self.config, room)
        return self.choose(logits.whole())

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`route` from float32 logits [N, experts]."""
        scores = logits.sigmoid()
        ranked = scores + self.bias
        if self.config.groups > 1:
            grouped = ranked.view(len(ranked), self.config.groups, -1)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.config.top_groups, dim=-1, sorted=False).indices
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            ranked = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
        ids = ranked.topk(self.config.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if self.config.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.config.scale, ids
