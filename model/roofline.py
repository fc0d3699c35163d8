"""What the hardware needs at least for the parts of a decode step and of a prompt's chunk (a roofline model)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from kernels.operands import BlockFp8
from kvcache.choices import KVCacheDtype
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
        """Both at once, in fp8 if one of them is."""
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
        drafts: bool = False,
    ) -> "RankModel":
        """The first of `ranks` ranks, in bfloat16. fp8: weights in block-fp8. On the meta device it takes no memory.
        drafts: with the draft layer.

        Raises ValueError for a number of ranks that the experts cannot be divided by.
        """
        weights = RandomWeights(device, torch.bfloat16, BlockFp8(power_of_two=True) if fp8 else None)
        network = Network.load(weights, sizes, Shard(0, ranks), exchange, drafts)
        spec = sizes.spec(torch.bfloat16, context_length, "random", kv_cache_dtype, drafts)
        return cls(network, spec, weights.num_bytes)


Works = dict[StepPart, tuple[Work, ...]]
"""What a part does one after the other."""


def work_of_step(
    model: RankModel, batch: int, context: int, missed: float, requests_in_group: int, drafts: int = 0
) -> Works:
    """The work of a step of `batch` requests of `context` tokens. missed: positions per token and index layer. drafts:
    of each request, that the step verifies and makes.

    Weights are read once, of routed experts those that random choices of the group's tokens hit, on average; items of
    a request that several tokens select, index keys and scores once. Each draft reads the head once more.
    """
    spec, width = model.spec, 1 + drafts
    layers = model.network.layers
    maps = _maps_of(model, layers, batch * width, requests_in_group * width)
    selected = min(model.config.index_topk, context)
    items = batch * (selected + drafts * min(missed, selected))
    on_kv = _work_on_kv(model, layers, batch * context, batch * width * context, items, batch * width * selected)
    fetched = (len(layers) * width + (drafts > 0)) * batch * missed * spec.kv_format.item_bytes
    head = model.network.head
    projections = [maps.projections + maps.absorbed, Work(head.nbytes, 2 * batch * width * head.numel())]
    experts = [maps.experts + maps.router]
    if (draft := model.network.draft) is not None:
        of_one = _maps_of(model, (draft.layer,), batch, requests_in_group)
        projections.append(_work_of_map(Linear(draft.projection), batch * width))
        for _ in range(drafts):
            projections += [of_one.projections + of_one.absorbed, Work(head.nbytes, 2 * batch * head.numel())]
            experts.append(of_one.experts + of_one.router)
        of_draft = _work_on_kv(
            model, (draft.layer,), batch * context, batch * context, batch * selected, batch * selected
        )
        on_kv = {part: works + of_draft[part] * drafts for part, works in on_kv.items()}
    return {
        StepPart.PROJECTIONS: tuple(projections),
        StepPart.EXPERTS: tuple(experts),
        **on_kv,
        StepPart.SWAP_IN: (Work(link_bytes=fetched),),
        StepPart.REST: (),
    }


def _maps_of(model: RankModel, layers: Sequence[Layer], tokens: int, group_tokens: int) -> "_LayerWork":
    """Of layers whose experts are those that random choices of the group's tokens hit."""
    router = model.config.router
    return _LayerWork.of(layers, tokens, group_tokens, hit=1 - (1 - router.top_k / router.experts) ** group_tokens)


def work_of_chunk(model: RankModel, context: int, chunk: int, rank_of: int) -> Works:
    """The work of the last `chunk` tokens of a prompt of `context` tokens.

    Of the last layer, or of the draft layer if there is one, the model computes only what stores its KV. Weights,
    items, index keys and scores are read once; every token of the group chooses experts at random. A position is scored
    by the tokens from it on. With experts in fp8 the router runs outside of the experts' part: see `timing.PARTS`.
    """
    *whole, last = model.network.layers
    stored = _work_of_map(last.down, chunk)
    if (draft := model.network.draft) is not None:
        whole.append(last)
        stored = _work_of_map(draft.layer.down, chunk) + _work_of_map(Linear(draft.projection), chunk)
    maps = _LayerWork.of(whole, chunk, chunk * rank_of, hit=1.0)
    outside, within = (maps.router, Work()) if maps.experts.in_fp8 else (Work(), maps.router)
    start = context - chunk
    scored = sum(range(start + 1, context + 1))
    selected = sum(min(position + 1, model.config.index_topk) for position in range(start, context))
    return {
        StepPart.PROJECTIONS: (maps.projections + stored, maps.absorbed + outside),
        StepPart.EXPERTS: (maps.experts, within),
        **_work_on_kv(model, whole, context, scored, context, selected),
        StepPart.REST: (),
    }


@dataclass(frozen=True)
class _LayerWork:
    """The work of the linear maps of some layers. absorbed: key and value maps, which are in bfloat16."""

    projections: Work
    absorbed: Work
    experts: Work
    router: Work

    @classmethod
    def of(cls, layers: Sequence[Layer], tokens: int, group_tokens: int, hit: float) -> "_LayerWork":
        """tokens: of this rank. group_tokens: of all ranks, which choose experts. hit: part of the experts chosen.

        In fp8 a rank chooses experts for its own tokens, else for the group's.
        """
        projections = absorbed = experts = router = Work()
        for layer in layers:
            attention, mlp = layer.attention, layer.mlp
            maps = [layer.down, layer.query_b, attention.out]
            if layer.indexer:
                maps.append(layer.indexer.query)
            absorbed += _work_of_map(Linear(attention.key_map), tokens) + _work_of_map(
                Linear(attention.value_map), tokens
            )
            if isinstance(mlp, MixtureOfExperts):
                config = mlp.router.config
                for stack in (mlp.gate_up, mlp.down):
                    experts += _work_of_map(
                        _some(stack, slice(mlp.number)), group_tokens * config.top_k / config.experts, hit
                    )
                    experts += _work_of_map(_some(stack, slice(mlp.number, None)), tokens)
                for shared in (mlp.shared.gate_up, mlp.shared.down) if mlp.shared else ():
                    experts += _work_of_map(shared, tokens)
                router += _work_of_map(Linear(mlp.router.weight), tokens if mlp.gate_up.fp8 else group_tokens)
            else:
                maps += [mlp.gate_up, mlp.down]
            for linear in maps:
                projections += _work_of_map(linear, tokens)
        return cls(projections, absorbed, experts, router)


def _work_on_kv(
    model: RankModel, layers: Sequence[Layer], keys: int, scored: int, items: float, selected: int
) -> Works:
    """The work of indexers and attention. In each layer: index keys and items that are read, and pairs of a query and a
    position that is scored or attended to."""
    config, spec = model.config, model.spec
    indexers = sum(layer.indexer is not None for layer in layers)
    index = Work(
        indexers * keys * spec.kv_format.index_key_bytes,
        2 * indexers * scored * config.index_heads * config.index_dim,
        spec.kv_format.fp8_layout is not None,
    )
    attention = Work(
        len(layers) * items * spec.kv_format.item_bytes,
        2 * len(layers) * selected * config.heads * (spec.item_dim + spec.latent_dim),
    )
    return {
        StepPart.INDEX: (index,),
        StepPart.TOP_K: (Work(indexers * scored * 4),),
        StepPart.ATTENTION: (attention,),
    }


def _work_of_map(linear: Linear, tokens: float, read: float = 1.0) -> Work:
    """Of a linear map that computes `tokens` tokens, or a stack of which each does. read: part of the weights read."""
    num_bytes = linear.weight.nbytes + (0 if linear.scales is None else linear.scales.nbytes)
    return Work(read * num_bytes, 2 * tokens * linear.weight.numel(), linear.scales is not None)


def _some(stack: Linear, maps: slice) -> Linear:
    return Linear(stack.weight[maps], None if stack.scales is None else stack.scales[maps])
