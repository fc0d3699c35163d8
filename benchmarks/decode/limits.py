"""What the hardware needs at least for each part of a decode step."""

from dataclasses import dataclass

from benchmarks.decode.timing import Part
from benchmarks.decode.workload import Model
from model.feed_forward import MixtureOfExperts
from model.linear import Linear

HBM_BYTES_PER_MS = 4.8e9
BF16_PER_MS = 800e9
"""Operations of tensor cores that can be reached in bfloat16; twice as many in fp8."""


@dataclass(frozen=True)
class Work:
    """Of one part in one step. num_bytes: of HBM. operations: additions and multiplications. link_bytes: over PCIe."""

    num_bytes: float = 0.0
    operations: float = 0.0
    in_fp8: bool = False
    link_bytes: float = 0.0

    def ms(self, link_gb_per_s: float) -> float:
        """The larger of what memory and tensor cores take, and what the link takes after that."""
        rate = BF16_PER_MS * (2 if self.in_fp8 else 1)
        return max(self.num_bytes / HBM_BYTES_PER_MS, self.operations / rate) + self.link_bytes / link_gb_per_s / 1e6


Works = dict[Part, tuple[Work, ...]]
"""What a part does one after the other."""


def work_of(model: Model, batch: int, context: int, missed: float, rank_of: int) -> Works:
    """The work of a step of `batch` requests of `context` tokens. missed: positions per request and index layer.

    Weights are read once, of routed experts those that random choices of the group's tokens hit, on average; items,
    index keys and scores once. In fp8 a rank chooses experts for its own tokens, else for the group's.
    """
    config, spec = model.config, model.spec
    layers, index_layers = spec.num_layers, spec.num_index_layers
    heads, top_k = config.heads, min(config.index_topk, context)
    projections = experts = 0.0
    projected = expert_operations = 0.0
    tokens = batch * rank_of
    router = config.router
    hit = 1 - (1 - router.top_k / router.experts) ** tokens
    in_fp8 = False
    for layer in model.network.layers:
        attention, mlp = layer.attention, layer.mlp
        maps = [layer.down, layer.query_b, attention.out]
        if isinstance(mlp, MixtureOfExperts):
            one = bytes_of(mlp.gate_up[0]) + bytes_of(mlp.down[0])
            elements = mlp.gate_up[0].weight.numel() + mlp.down[0].weight.numel()
            experts += one * (mlp.number * hit + 1) + mlp.router.weight.nbytes
            routed = tokens * router.top_k * mlp.number / router.experts
            chosen_for = batch if mlp.gate_up.fp8 else tokens
            expert_operations += 2 * elements * (routed + batch) + 2 * chosen_for * mlp.router.weight.numel()
            in_fp8 |= mlp.gate_up.scales is not None
        else:
            maps += [mlp.gate_up, mlp.down]
        absorbed = attention.key_map, attention.value_map
        projections += sum(map(bytes_of, maps)) + sum(part.numel() * part.element_size() for part in absorbed)
        projected += 2 * batch * (sum(m.weight.numel() for m in maps) + sum(part.numel() for part in absorbed))
    item_bytes, key_bytes = spec.kv_format.item_bytes, spec.kv_format.index_key_bytes
    head = model.network.head
    return {
        Part.PROJECTIONS: (Work(projections, projected, in_fp8), Work(head.nbytes, 2 * batch * head.numel())),
        Part.EXPERTS: (Work(experts, expert_operations, in_fp8),),
        Part.INDEX: (
            Work(
                index_layers * batch * context * key_bytes,
                2 * index_layers * batch * context * config.index_heads * config.index_dim,
                spec.kv_cache_dtype == "fp8_e4m3",
            ),
        ),
        Part.TOP_K: (Work(index_layers * batch * context * 4),),
        Part.SWAP_IN: (Work(link_bytes=layers * batch * missed * item_bytes),),
        Part.ATTENTION: (
            Work(
                layers * batch * top_k * item_bytes,
                2 * layers * batch * top_k * heads * (spec.item_dim + spec.latent_dim),
            ),
        ),
        Part.REST: (),
    }


def bytes_of(linear: Linear) -> int:
    """Of a linear map's weights and scales."""
    return linear.weight.nbytes + (0 if linear.scales is None else linear.scales.nbytes)
