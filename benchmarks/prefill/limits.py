"""What the hardware needs at least for each part of a chunk of a prompt."""

from benchmarks.decode.limits import Work, Works, bytes_of
from benchmarks.decode.timing import Part
from benchmarks.decode.workload import Model
from model.feed_forward import MixtureOfExperts
from model.linear import Linear


def work_of_chunk(model: Model, context: int, chunk: int, rank_of: int) -> Works:
    """The work of the last `chunk` tokens of a prompt of `context` tokens.

    As the model computes it: of the last layer nothing but what stores its KV. Weights, items, index keys and scores
    are read once; every token of the group chooses experts at random. A position is scored by the tokens from it on.
    With experts in fp8 a rank multiplies its own tokens by the router, else those of the group: see `timing.PARTS`.
    """
    projections, maps, experts, router = (_Sum() for _ in range(4))
    *whole, last = model.network.layers
    for layer in whole:
        projections.add(layer.down, chunk)
        projections.add(layer.query_b, chunk)
        projections.add(layer.attention.out, chunk)
        for absorbed in (layer.attention.key_map, layer.attention.value_map):
            maps.add(Linear(absorbed), chunk)
        mlp = layer.mlp
        if isinstance(mlp, MixtureOfExperts):
            tokens = chunk * rank_of
            routed = tokens * mlp.router.config.top_k / mlp.router.config.experts
            for stacked in (mlp.gate_up, mlp.down):
                experts.add(_some(stacked, slice(mlp.number)), routed)
                experts.add(_some(stacked, slice(mlp.number, None)), chunk)
            if mlp.gate_up.fp8:
                maps.add(Linear(mlp.router.weight), chunk)
            else:
                router.add(Linear(mlp.router.weight), tokens)
            if mlp.shared:
                experts.add(mlp.shared.gate_up, chunk)
                experts.add(mlp.shared.down, chunk)
        else:
            projections.add(mlp.gate_up, chunk)
            projections.add(mlp.down, chunk)
    projections.add(last.down, chunk)

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
        Part.PROJECTIONS: (projections.work, maps.work),
        Part.EXPERTS: (experts.work, router.work),
        Part.INDEX: (index,),
        Part.TOP_K: (top_k,),
        Part.ATTENTION: (attention,),
        Part.REST: (),
    }


class _Sum:
    """The work of several linear maps of one type."""

    def __init__(self) -> None:
        self.work = Work()

    def add(self, linear: Linear, tokens: float) -> None:
        """One that computes so many tokens, or a stack of which each map does."""
        operations = 2 * tokens * linear.weight.numel()
        in_fp8 = linear.scales is not None
        before = self.work
        self.work = Work(before.num_bytes + bytes_of(linear), before.operations + operations, in_fp8)


def _some(stack: Linear, maps: slice) -> Linear:
    return Linear(stack.weight[maps], None if stack.scales is None else stack.scales[maps])
