"""What the hardware needs at least for the parts of a decode step and of a prompt's chunk (a roofline model)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from kernels.operands import BlockFp8
from kvcache.format import KVCacheDtype
from model.config import ModelSpec, NetworkConfig
from model.feed_forward import MixtureOfExperts
from model.network import Layer, Network
from model.shard import NO_EXCHANGE, Exchange, Shard
from model.weights import Linear, RandomWeights

HBM_BYTES_PER_MS = 4.8e9
BF16_PER_MS = 800e9
"""Operations of tensor cores that can be reached in bfloat16; twice as many in fp8."""


class StepPart(StrEnum):
    """Of a decode step."""

    PROJECTIONS = "projections"
    """Of attention, indexers, routers, dense layers and the head."""
    EXPERTS = "experts"
    INDEX = "index"
    TOP_K = "top-k"
    SWAP_IN = "swap-in"
    ATTENTION = "attention"
    REST = "rest"


@dataclass(frozen=True)
class Work:
    """Of one part in one step. num_bytes: of HBM. operations: additions and multiplications. link_bytes: over PCIe."""

    num_bytes: float = 0.0
    operations: float = 0.0
    in_fp8: bool = False
    link_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        """Both, of one type of numbers."""
        return Work(
            self.num_bytes + other.num_bytes,
            self.operations + other.operations,
            self.in_fp8 or other.in_fp8,
            self.link_bytes + other.link_bytes,
        )

    def ms(self, link_gb_per_s: float) -> float:
        """The larger of what memory and tensor cores take, and what the link takes after that."""
        rate = BF16_PER_MS * (2 if self.in_fp8 else 1)
        return max(self.num_bytes / HBM_BYTES_PER_MS, self.operations / rate) + self.link_bytes / link_gb_per_s / 1e6


@dataclass(frozen=True)
class RankModel:
    """One rank's part of a network with random weights. num_bytes: of the weights."""

    network: Network
    spec: ModelSpec
    num_bytes: int

    @property
    def config(self) -> NetworkConfig:
        return self.network.config

    @classmethod
    def build(
        cls,
        sizes: NetworkConfig,
        *,
        ranks: int,
        fp8: bool,
        context_length: int,
        kv_cache_dtype: KVCacheDtype,
        device: torch.device,
        exchange: Exchange = NO_EXCHANGE,
    ) -> "RankModel":
        """The first of `ranks` ranks, in bfloat16. fp8: weights in block-fp8. On the meta device it takes no memory.

        Raises ValueError for a number of ranks that the experts cannot be divided by.
        """
        weights = RandomWeights(device, torch.bfloat16, BlockFp8(power_of_two=True) if fp8 else None)
        network = Network.load(weights, sizes, Shard(0, ranks), exchange)
        spec = sizes.spec(torch.bfloat16, context_length, "random", kv_cache_dtype)
        return cls(network, spec, weights.num_bytes)


Works = dict[StepPart, tuple[Work, ...]]
"""What a part does one after the other."""


def work_of_step(model: RankModel, batch: int, context: int, missed: float, rank_of: int) -> Works:
    """The work of a step of `batch` requests of `context` tokens. missed: positions per request and index layer.

    Weights are read once, of routed experts those that random choices of the group's tokens hit, on average; items,
    index keys and scores once. In fp8 a rank chooses experts for its own tokens, else for the group's.
    """
    config, spec, router = model.config, model.spec, model.config.router
    layers, index_layers = spec.num_layers, spec.num_index_layers
    tokens = batch * rank_of
    hit = 1 - (1 - router.top_k / router.experts) ** tokens
    projections = experts = Work()
    for layer in model.network.layers:
        projections += _products([*_dense_maps(layer), *_absorbed(layer)], batch)
        if isinstance(mlp := layer.mlp, MixtureOfExperts):
            one = _products([mlp.gate_up[0], mlp.down[0]], 1)
            routed = tokens * router.top_k * mlp.number / router.experts
            experts += Work(one.num_bytes * (mlp.number * hit + 1), one.operations * (routed + batch), one.in_fp8)
            experts += _products([Linear(mlp.router.weight)], batch if mlp.gate_up.fp8 else tokens)
    item_bytes, key_bytes = spec.kv_format.item_bytes, spec.kv_format.index_key_bytes
    head, top_k = model.network.head, min(config.index_topk, context)
    return {
        StepPart.PROJECTIONS: (projections, Work(head.nbytes, 2 * batch * head.numel())),
        StepPart.EXPERTS: (experts,),
        StepPart.INDEX: (
            Work(
                index_layers * batch * context * key_bytes,
                2 * index_layers * batch * context * config.index_heads * config.index_dim,
                spec.kv_cache_dtype == "fp8_e4m3",
            ),
        ),
        StepPart.TOP_K: (Work(index_layers * batch * context * 4),),
        StepPart.SWAP_IN: (Work(link_bytes=layers * batch * missed * item_bytes),),
        StepPart.ATTENTION: (
            Work(
                layers * batch * top_k * item_bytes,
                2 * layers * batch * top_k * config.heads * (spec.item_dim + spec.latent_dim),
            ),
        ),
        StepPart.REST: (),
    }


def work_of_chunk(model: RankModel, context: int, chunk: int, rank_of: int) -> Works:
    """The work of the last `chunk` tokens of a prompt of `context` tokens.

    As the model computes it: of the last layer nothing but what stores its KV. Weights, items, index keys and scores
    are read once; every token of the group chooses experts at random. A position is scored by the tokens from it on.
    With experts in fp8 a rank multiplies its own tokens by the router, else those of the group: see `timing.PARTS`.
    """
    *whole, last = model.network.layers
    projections, maps, experts, router = _products([last.down], chunk), Work(), Work(), Work()
    for layer in whole:
        projections += _products(_dense_maps(layer), chunk)
        maps += _products(_absorbed(layer), chunk)
        if isinstance(mlp := layer.mlp, MixtureOfExperts):
            tokens = chunk * rank_of
            routed = tokens * mlp.router.config.top_k / mlp.router.config.experts
            stacks = (mlp.gate_up, mlp.down)
            experts += _products([_some(stack, slice(mlp.number)) for stack in stacks], routed)
            experts += _products([_some(stack, slice(mlp.number, None)) for stack in stacks], chunk)
            experts += _products([mlp.shared.gate_up, mlp.shared.down] if mlp.shared else [], chunk)
            if mlp.gate_up.fp8:
                maps += _products([Linear(mlp.router.weight)], chunk)
            else:
                router += _products([Linear(mlp.router.weight)], tokens)

    spec, config = model.spec, model.config
    start = context - chunk
    scored = sum(range(start + 1, context + 1))
    selected = sum(min(position + 1, config.index_topk) for position in range(start, context))
    indexers = sum(layer.indexer is not None for layer in whole)
    index = Work(
        indexers * context * spec.kv_format.index_key_bytes,
        2 * indexers * scored * config.index_heads * config.index_dim,
        spec.kv_cache_dtype == "fp8_e4m3",
    )
    top_k = Work(indexers * scored * 4)
    attention = Work(
        len(whole) * context * spec.kv_format.item_bytes,
        2 * len(whole) * selected * config.heads * (spec.item_dim + spec.latent_dim),
    )
    return {
        StepPart.PROJECTIONS: (projections, maps),
        StepPart.EXPERTS: (experts, router),
        StepPart.INDEX: (index,),
        StepPart.TOP_K: (top_k,),
        StepPart.ATTENTION: (attention,),
        StepPart.REST: (),
    }


def _products(maps: Sequence[Linear], tokens: float) -> Work:
    """The work of linear maps, or of stacks of them, each of which computes that many tokens."""
    num_bytes = sum(map(bytes_of, maps))
    operations = 2 * tokens * sum(linear.weight.numel() for linear in maps)
    return Work(num_bytes, operations, any(linear.scales is not None for linear in maps))


def bytes_of(linear: Linear) -> int:
    """Of a linear map's weights and scales."""
    return linear.weight.nbytes + (0 if linear.scales is None else linear.scales.nbytes)


def _dense_maps(layer: Layer) -> list[Linear]:
    """All linear maps of a layer but those of a mixture of experts and `_absorbed`."""
    dense = [] if isinstance(layer.mlp, MixtureOfExperts) else [layer.mlp.gate_up, layer.mlp.down]
    return [layer.down, layer.query_b, layer.attention.out, *dense]


def _absorbed(layer: Layer) -> list[Linear]:
    return [Linear(layer.attention.key_map), Linear(layer.attention.value_map)]


def _some(stack: Linear, maps: slice) -> Linear:
    return Linear(stack.weight[maps], None if stack.scales is None else stack.scales[maps])
