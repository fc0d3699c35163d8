"""Feed-forward networks: dense ones, and mixtures of experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

from dataclasses import dataclass

import torch

from base.errors import StartupError
from kernels.fp8 import BLOCK
from kernels.operands import Activations, Pair, RmsNorm, RouterConfig
from kernels.ops import ops_for
from kernels.torch_ops import swiglu
from model.config import NetworkConfig
from model.shard import NO_EXCHANGE, Exchange, RoutedTokens, Shard
from model.weights import Linear, Weights, given, quantised, swiglu_weights


@dataclass(frozen=True)
class FeedForward:
    """A network with a gate: SwiGLU (Shazeer, arXiv:2002.05202).

    gate_up: the gate's rows before those of the other factor, [2 * width, hidden_size].
    """

    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, weights: Weights, name: str, hidden_size: int, width: int) -> "FeedForward":
        """The network of that name, such as `model.layers.0.mlp`."""
        return cls(
            gate_up=weights.linear({f"{name}.gate_proj": width, f"{name}.up_proj": width}, hidden_size),
            down=weights.linear({f"{name}.down_proj": hidden_size}, width),
        )

    def forward_normed(
        self,
        norm: RmsNorm,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden + addend, see `Ops.add_rms_norm`, and what the network computes of the norm of that.

        positions: of the tokens; a dense network computes padding like a token.
        """
        summed, normed = ops_for(hidden).add_rms_norm(hidden, addend, norm, self.gate_up.fp8)
        return summed, self(normed)

    def __call__(self, x: torch.Tensor | Activations) -> torch.Tensor:
        """x: [N, hidden_size]. Returns the same shape."""
        if self.gate_up.scales is None or self.down.scales is None:
            return self.down(swiglu(self.gate_up(x)))
        x, weights = given(x), swiglu_weights(self.gate_up, self.down)
        return ops_for(x.dense).mlp_fp8(*quantised(x, weights.power_of_two), weights)


@dataclass(frozen=True)
class Router:
    """Chooses the experts of a token.

    weight: [experts, hidden_size]. bias: float32 [experts], added to the scores for the choice and not for the weights.
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
        self, hidden: torch.Tensor, room: Pair | None = None, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of the experts of hidden states [N, hidden_size]: see `Ops.choose_experts`."""
        ops = ops_for(hidden)
        return ops.choose_experts(ops.float32_product(hidden, self.weight), self.bias, self.config, room, positions)


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

    def forward_normed(
        self,
        norm: RmsNorm,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden + addend, see `Ops.add_rms_norm`, and what the mixture computes of the norm of that.

        hidden, addend: of this process's tokens. positions: int64 [N], below 0 for padding, which chooses no experts,
        so that their weights need not be read for it; where experts are not in fp8 it does. In block-fp8 the process
        quantises and routes its tokens, and gathers those of all processes like that. Else it gathers normed hidden
        states, and routes those of all.
        """
        ops, fp8 = ops_for(hidden), self.gate_up.fp8
        if fp8 is None:
            summed, normed = ops.add_rms_norm(hidden, addend, norm)
            return summed, self._forward_dense(normed.dense)
        tokens = RoutedTokens.empty(len(hidden), hidden.shape[1], self.router.config.top_k, hidden.device)
        summed, normed = ops.add_rms_norm(hidden, addend, norm, fp8, tokens.quantised)
        self.router.route(normed.dense, tokens.choice, positions)
        gathered = tokens.gathered(self.exchange)
        # A shared expert that is one of the stack computes this process's tokens.
        own = None if self.shared else self.exchange.own(len(hidden))
        weights = swiglu_weights(self.gate_up, self.down, self.first)
        computed = ops.experts_fp8(*gathered.quantised, gathered.ids, gathered.weights, weights, own)
        total = self.exchange.reduce(computed)
        return summed, total + self.shared(normed.dense) if self.shared else total

    def _forward_dense(self, normed: torch.Tensor) -> torch.Tensor:
        """For weights in the network's dtype."""
        gathered = self.exchange.gather(normed)
        weights, ids = self.router.route(gathered)
        shared = self.shared or FeedForward(self.gate_up[self.number], self.down[self.number])
        return self.exchange.reduce(self.routed(gathered, ids, weights)) + shared(normed)

    def routed(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts of this process. ids, weights: [N, top_k], see Router.route.

        For weights in the network's dtype.
        """
        gate_up, down = self.gate_up.weight[: self.number], self.down.weight[: self.number]
        is_part = self.number < len(self.router.weight)
        return ops_for(hidden).experts(hidden, ids - self.first, weights, gate_up, down, is_part)
