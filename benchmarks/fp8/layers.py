"""Layers of real shapes with random block-fp8 weights, and what they take."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.graph_timing import median_us
from kernels.fp8 import FP8, blocks
from kernels.operands import BlockFp8, RmsNorm, RouterConfig, SwiGluWeights
from kernels.ops import ops_for
from model.feed_forward import Router
from model.shard import RoutedTokens

LINEAR = {
    "V3.2 q_a, kv_a, index wk": (2240, 7168),
    "V3.2 q_b, index wq_b": (32768, 1536),
    "V3.2 o_proj": (7168, 16384),
    "V3.2 dense gate, up": (36864, 7168),
    "V3.2 dense down": (7168, 18432),
    "V3.2 shared gate, up": (4096, 7168),
    "V3.2 shared down": (7168, 2048),
    "GLM-5 q_a, kv_a, index wk": (2752, 6144),
    "GLM-5 q_b, index wq_b": (20480, 2048),
    "GLM-5 o_proj": (6144, 16384),
    "GLM-5 dense gate, up": (24576, 6144),
    "GLM-5 dense down": (6144, 12288),
}
TOKENS = (1, 8, 16, 64, 256, 4096)
EXPERT_TOKENS = (1, 8, 64, 128, 256, 512, 8192, 65536)
"""Of the group, whose ranks have an eighth of the experts each."""

HIDDEN, WIDTH, EXPERTS, RANKS, TOP_K = 7168, 2048, 256, 8, 8
BYTES_PER_US, OPERATIONS_PER_US = 4.8e6, 1.6e9
_UNCACHED_BYTES = 256 << 20

Weight = tuple[torch.Tensor, torch.Tensor]
Routed = tuple[torch.Tensor, torch.Tensor]
"""Weights and ids of chosen experts."""


@dataclass(frozen=True)
class Result:
    """Microseconds. us: of each way to compute it."""

    name: str
    tokens: int
    us: dict[str, float]
    limit: float


def limit(num_bytes: float, operations: float) -> float:
    """Microseconds that the hardware needs at least."""
    return max(num_bytes / BYTES_PER_US, operations / OPERATIONS_PER_US)


def random_weight(*shape: int) -> Weight:
    """Values and scales of a weight [..., N, K]."""
    values = torch.empty(shape, dtype=FP8)
    rows = values.view(-1, shape[-1])
    for begin in range(0, len(rows), 1 << 15):
        part = rows[begin : begin + (1 << 15)]
        part.copy_(100 * torch.randn(part.shape))
    return values, torch.rand(*shape[:-2], *map(blocks, shape[-2:])) / (100 * shape[-1] ** 0.5)


def random_layers(n: int, k: int) -> list[Weight]:
    """Weights of one shape, too many for the device's cache."""
    return [random_weight(n, k) for _ in range(max(2, -(-_UNCACHED_BYTES // (n * k))))]


def linear_results(name: str, n: int, k: int) -> Iterator[Result]:
    """One layer: from bfloat16 (with quantisation), from quantised activations, and by torch's kernel from these."""
    from kernels.triton import linear_fp8, quantise, reduce_fp8
    from kernels.triton.fp8_linear import torch_product

    layers = random_layers(n, k)

    def whole(turn: int, x: torch.Tensor) -> object:
        return product(turn, quantise(x, True))

    def product(turn: int, quantised: Weight) -> object:
        return reduce_fp8(linear_fp8(*quantised, *layers[turn]))

    def torchs(turn: int, quantised: Weight) -> object:
        return torch_product(*quantised, *layers[turn])

    for tokens in TOKENS:
        x = torch.randn(tokens, k, dtype=torch.bfloat16)
        quantised = quantise(x, True)
        us = {
            "ours": median_us(partial(whole, x=x), len(layers)),
            "quantised": median_us(partial(product, quantised=quantised), len(layers)),
            "scaled_mm": median_us(partial(torchs, quantised=quantised), len(layers)),
        }
        yield Result(name, tokens, us, limit(n * k + tokens * (2 * k + 2 * n), 2 * tokens * n * k))


@dataclass(frozen=True)
class MoELayer:
    """A mixture of experts as one rank of eight has it. projections: of its experts, and last of the shared expert."""

    norm: RmsNorm
    router: Router
    projections: SwiGluWeights

    @classmethod
    def random(cls, by_column: bool = False) -> "MoELayer":
        """by_column: the rank has an eighth of each expert's width, instead of an eighth of the experts."""
        chooser = 0.05 * torch.randn(EXPERTS, HIDDEN, dtype=torch.bfloat16)
        router = Router(chooser, torch.zeros(EXPERTS), RouterConfig(EXPERTS, TOP_K, 8, 4, True, 2.5))
        count, width = (EXPERTS, WIDTH // RANKS) if by_column else (EXPERTS // RANKS, WIDTH)
        weights = (*random_weight(count + 1, 2 * width, HIDDEN), *random_weight(count + 1, HIDDEN, width))
        norm = RmsNorm(torch.ones(HIDDEN, dtype=torch.bfloat16), 1e-6)
        return cls(norm, router, SwiGluWeights(*weights, power_of_two=True))

    @property
    def count(self) -> int:
        """Experts that tokens choose."""
        return len(self.projections.down) - 1

    @staticmethod
    def own(tokens: int) -> int:
        """The rank's own tokens, of so many of the group."""
        return -(-tokens // RANKS)

    def shared(self, tokens: int) -> int:
        """Tokens that the shared expert computes here: the rank's own, or all with a part of its width."""
        return tokens if self.count == EXPERTS else self.own(tokens)

    def routed(self, hidden: torch.Tensor, routed: Routed) -> torch.Tensor:
        """The routed experts alone."""
        ops, (weights, ids) = ops_for(hidden), routed
        return ops.experts_fp8(*ops.quantise(hidden, True), ids, weights, self.projections, shared=range(0))

    def route(self, hidden: torch.Tensor, tokens: RoutedTokens) -> None:
        """Norm, quantise and route hidden states, and write all that into their rows."""
        fp8 = BlockFp8(power_of_two=True)
        _, normed = ops_for(hidden).add_rms_norm(hidden, None, self.norm, fp8, tokens.quantised)
        self.router.route(normed.dense, tokens.choice)

    def whole(self, hidden: torch.Tensor, tokens: RoutedTokens) -> torch.Tensor:
        """From the norm of the rank's own tokens, the first ones, to the sums of the group's.

        tokens: of the group, of which the others' have been routed. The shared expert is one of the kernels' experts.
        """
        own = self.own(len(hidden))
        self.route(hidden[:own], tokens[:own])
        shared = range(self.shared(len(hidden)))
        computed = ops_for(hidden).experts_fp8
        return computed(*tokens.quantised, tokens.ids, tokens.weights, self.projections, shared)


def expert_results() -> Iterator[Result]:
    """The whole layer of a rank, and its routed experts, for tokens of the group, which choose at random. There are no
    collectives. The limit is that of all experts."""
    yield from _results(random_moe_layers(), "", EXPERT_TOKENS)
    yield from _results(random_moe_layers(by_column=True), "by column: ", (8, 128, 512))


def random_moe_layers(by_column: bool = False) -> list[MoELayer]:
    """Some, so that no turn finds the shared expert's weights in the device's cache."""
    torch.manual_seed(0)
    return [MoELayer.random(by_column) for _ in range(3)]


def _results(layers: list[MoELayer], prefix: str, counts: tuple[int, ...]) -> Iterator[Result]:
    for tokens in counts:
        # How many experts are hit decides: every run and every version is to compute the same tokens.
        torch.manual_seed(tokens)
        case = ExpertCase.random(layers, tokens)
        us = {
            "layer": median_us(case.whole, case.turns),
            "experts": median_us(case.experts, case.turns),
        }
        yield Result(f"{prefix}{case.used:.1f} experts, {case.rows:.0f} rows", tokens, us, case.limit)


@dataclass(frozen=True)
class ExpertCase:
    """Tokens of each turn. turns: 0 for what is timed without a graph. used, rows: experts and pairs of the rank.

    tokens: of the group, as they are gathered.
    """

    layers: list[MoELayer]
    hidden: torch.Tensor
    chosen: list[Routed]
    tokens: list[RoutedTokens]
    turns: int
    used: float
    rows: float

    @classmethod
    def random(cls, layers: list[MoELayer], tokens: int) -> "ExpertCase":
        turns = 60 if tokens <= 8 else 3 if tokens <= 512 else 0
        hidden = torch.randn(max(1, turns), tokens, HIDDEN, dtype=torch.bfloat16)
        chosen = [layers[turn % len(layers)].router.route(part) for turn, part in enumerate(hidden)]
        local = [ids[ids < layers[0].count].tolist() for _, ids in chosen]
        used = statistics.mean(len(set(part)) for part in local)
        gathered = [RoutedTokens.empty(tokens, HIDDEN, TOP_K, hidden.device) for _ in hidden]
        for turn, part in enumerate(hidden):
            layers[turn % len(layers)].route(part, gathered[turn])
        return cls(layers, hidden, chosen, gathered, turns, used, statistics.mean(map(len, local)))

    @property
    def limit(self) -> float:
        """Microseconds that the hardware needs at least for the experts, the shared one included."""
        size = 3 * HIDDEN * self.layers[0].projections.down.shape[2]
        rows = self.rows + self.layers[0].shared(self.hidden.shape[1])
        return limit((self.used + 1) * size + 4 * self.hidden[0].numel(), 2 * rows * size)

    def _layer(self, turn: int) -> MoELayer:
        return self.layers[turn % len(self.layers)]

    def experts(self, turn: int) -> object:
        return self._layer(turn).routed(self.hidden[turn], self.chosen[turn])

    def whole(self, turn: int) -> object:
        return self._layer(turn).whole(self.hidden[turn], self.tokens[turn])
