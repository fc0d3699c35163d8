"""Mixtures of experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from base.errors import StartupError
from model.backends.device import fuses
from model.config import NetworkConfig
from model.feed_forward import FeedForward, swiglu
from model.fp8 import BLOCK
from model.linear import Linear
from model.norm import RmsNorm
from model.routed import RoutedTokens
from model.router import Router
from model.shard import NO_EXCHANGE, Exchange, Shard
from model.weights import Weights

_ALL_AT_ONCE_BYTES = 1 << 30
"""Every expert computes every token if what that makes is at most so large."""


@dataclass(frozen=True)
class MixtureOfExperts:
    """The routed experts that this process has, those from `first` on, and the shared expert.

    gate_up, down: of the `number` routed experts, [experts, 2 * width, hidden_size] and [experts, hidden_size, width],
    followed by the shared expert if that has the same width; else it is `shared`.
    """

    router: Router
    gate_up: Linear
    down: Linear
    first: int
    number: int
    shared: FeedForward | None
    exchange: Exchange = NO_EXCHANGE

    @classmethod
    def load(
        cls, weights: Weights, name: str, config: NetworkConfig, shard: Shard, exchange: Exchange = NO_EXCHANGE
    ) -> "MixtureOfExperts":
        """The mixture of that name, such as `model.layers.3.mlp`. Raises StartupError if it is in fp8 in part."""
        hidden_size, width = config.hidden_size, config.expert_width
        own, shared = shard.experts(config.router.experts), f"{name}.shared_experts"
        experts = [f"{name}.experts.{number}" for number in own]
        if config.shared_width == width:
            experts.append(shared)
        gate_up = weights.stack(
            [{f"{expert}.gate_proj": width, f"{expert}.up_proj": width} for expert in experts], hidden_size
        )
        down = weights.stack([{f"{expert}.down_proj": hidden_size} for expert in experts], width, multiple=BLOCK)
        if (gate_up.scales is None) != (down.scales is None):
            raise StartupError(f"of {name}.experts some projections are in fp8 and others are not, which is not served")
        return cls(
            router=Router.load(weights, f"{name}.gate", hidden_size, config.router),
            gate_up=gate_up,
            down=down,
            first=own.start,
            number=len(own),
            shared=None
            if config.shared_width == width
            else FeedForward.load(weights, shared, hidden_size, config.shared_width),
            exchange=exchange,
        )

    def of_norm(
        self, norm: RmsNorm, hidden: torch.Tensor, addend: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden + addend, see `RmsNorm.of_sum`, and what the mixture computes of the norm of that.

        hidden, addend: of this process's tokens. In block-fp8 the process quantises and routes them, and gathers those
        of all processes like that. Else it gathers normed hidden states, and routes those of all.
        """
        fp8 = self.gate_up.fp8
        if fp8 is None:
            summed, normed = norm.of_sum(hidden, addend)
            return summed, self._of_dense(normed.dense)
        tokens = RoutedTokens.empty(len(hidden), hidden.shape[1], self.router.config.top_k, hidden.device)
        summed, normed = norm.of_sum(hidden, addend, fp8, tokens.quantised)
        self.router.route(normed.dense, tokens.choice)
        total = self.exchange.reduce(self._of_routed(tokens.gathered(self.exchange), len(hidden)))
        return summed, total + self.shared(normed.dense) if self.shared else total

    def _of_dense(self, normed: torch.Tensor) -> torch.Tensor:
        """For weights in the network's dtype."""
        gathered = self.exchange.gather(normed)
        weights, ids = self.router.route(gathered)
        shared = self.shared or FeedForward(self.gate_up[self.number], self.down[self.number])
        return self.exchange.reduce(self.routed(gathered, ids, weights)) + shared(normed)

    def _of_routed(self, tokens: RoutedTokens, own: int) -> torch.Tensor:
        """What this process's experts compute of all processes' tokens, for weights in block-fp8.

        own: this process's tokens, which a shared expert computes that is one of these experts.
        """
        # Here, since a machine without a GPU need not have Triton.
        from model.backends.triton_fp8_experts import experts_quantised

        assert self.gate_up.scales is not None, "in block-fp8"
        assert self.down.scales is not None, "as gate_up is"
        return experts_quantised(
            *tokens.quantised,
            tokens.ids,
            tokens.weights,
            self.gate_up.weight,
            self.gate_up.scales,
            self.down.weight,
            self.down.scales,
            self.gate_up.power_of_two,
            self.first,
            shared=None if self.shared else self.exchange.own(own),
        )

    def routed(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts of this process. ids, weights: [N, top_k], see Router.route.

        For weights in the network's dtype.
        """
        ids = ids - self.first
        if fuses(hidden):
            return self._grouped(hidden, ids, weights)
        width = self.gate_up.weight.shape[1]
        if hidden.is_cuda and self.number * len(hidden) * width * hidden.element_size() <= _ALL_AT_ONCE_BYTES:
            return self._all_at_once(hidden, ids, weights)
        return self._one_by_one(hidden, ids, weights)

    def _one_by_one(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Waits to know which experts were chosen. In the order in which transformers adds up."""
        total = torch.zeros_like(hidden)
        for expert in range(self.number):
            choice, token = torch.where(ids.t() == expert)
            if len(token):
                computed = self.down[expert](swiglu(self.gate_up[expert](hidden[token])))
                total.index_add_(0, token, (computed * weights[token, choice, None]).to(hidden.dtype))
        return total

    def _all_at_once(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Waits for nothing, so that it can be recorded: every expert computes every token."""
        chosen = torch.arange(self.number, device=ids.device) == ids.unsqueeze(-1)
        weight_of = (weights.unsqueeze(-1) * chosen).sum(1)
        inner = swiglu(torch.matmul(hidden, self.gate_up.weight[: self.number].transpose(1, 2)))
        computed = torch.bmm(inner, self.down.weight[: self.number].transpose(1, 2))
        return torch.einsum("enh,ne->nh", computed.float(), weight_of).to(hidden.dtype)

    def _grouped(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """In bfloat16 on CUDA: pairs of a token and an expert are sorted by expert, and each projection is one grouped
        product over them. Pairs of experts that other processes have come last, and count nothing."""
        present = (ids >= 0) & (ids < self.number)
        expert_of, pairs = torch.where(present, ids, self.number).flatten().sort()
        ends = torch.searchsorted(expert_of, torch.arange(self.number, device=ids.device), right=True, out_int32=True)
        gate_up = F.grouped_mm(
            hidden[pairs // ids.shape[1]], self.gate_up.weight[: self.number].transpose(1, 2), offs=ends
        )
        down = F.grouped_mm(swiglu(gate_up), self.down.weight[: self.number].transpose(1, 2), offs=ends)
        by_token = torch.empty_like(down)
        by_token[pairs] = down
        weighted = by_token.view(*ids.shape, -1) * weights.unsqueeze(-1)
        if self.is_part:  # what was not computed may be no number
            weighted = weighted.where(present.unsqueeze(-1), 0.0)
        return weighted.sum(1).to(hidden.dtype)

    @property
    def is_part(self) -> bool:
        """Whether other processes have experts, too."""
        return self.number < len(self.router.weight)
