"""The projections of multi-head latent attention, which is computed in latent space, and of its indexer.

Keys and values of all heads are linear maps of one cached latent per token. Instead of expanding the latent, the key
map is absorbed into the query and the value map is applied to the attention output (DeepSeek-V2, arXiv:2405.04434,
section 2.1.2). A cached item is `[normed latent | roped key]`, and all heads read the same items.
The lightning indexer scores positions for selection (DeepSeek-V3.2, section 2.1).
"""

from dataclasses import dataclass

import torch

from kernels.operands import Activations, IndexQueries, LayerNorm, RmsNorm, Rope
from kernels.ops import ops_for
from model.config import NetworkConfig
from model.weights import Linear, Weights

_NORM_EPS = 1e-6
"""Of norms of latents and index keys, in transformers and in DeepSeek's code, whatever `rms_norm_eps` is."""


@dataclass(frozen=True)
class LatentAttention:
    """The projections of one layer, before and after the attention itself.

    key_map: [heads, nope_dim, latent_dim]; value_map: [heads, value_dim, latent_dim]. Both are of `kv_b_proj`, in the
    network's dtype.
    """

    query_norm: RmsNorm
    latent_norm: RmsNorm
    key_map: torch.Tensor
    value_map: torch.Tensor
    out: Linear

    @classmethod
    def load(cls, weights: Weights, name: str, config: NetworkConfig) -> "LatentAttention":
        """The projections of that name, such as `model.layers.0.self_attn`."""
        heads = config.heads
        per_head = weights.tensor(
            f"{name}.kv_b_proj.weight", (heads * (config.nope_dim + config.value_dim), config.latent_dim)
        ).view(heads, -1, config.latent_dim)
        return cls(
            query_norm=RmsNorm(weights.tensor(f"{name}.q_a_layernorm.weight", (config.query_rank,)), _NORM_EPS),
            latent_norm=RmsNorm(weights.tensor(f"{name}.kv_a_layernorm.weight", (config.latent_dim,)), _NORM_EPS),
            key_map=per_head[:, : config.nope_dim],
            value_map=per_head[:, config.nope_dim :],
            out=weights.linear({f"{name}.o_proj": config.hidden_size}, heads * config.value_dim),
        )

    def queries(self, projected: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Absorbed queries [N, heads, item_dim], to be compared with items, of those that `q_b_proj` makes, flat."""
        heads, nope_dim, _ = self.key_map.shape
        queries = projected.view(len(projected), heads, -1)
        query_nope, query_rope = queries.tensor_split((nope_dim,), dim=-1)
        return ops_for(queries).absorb(query_nope, query_rope, self.key_map, rope)

    def output(self, latents: torch.Tensor) -> torch.Tensor:
        """Map each head's attended latent, [N, heads, latent_dim], to hidden states [N, hidden_size], which may be in
        parts (`Linear.forward_split_k`)."""
        values = latents.new_empty(*latents.shape[:2], self.value_map.shape[1])
        torch.bmm(latents.transpose(0, 1), self.value_map.transpose(1, 2), out=values.transpose(0, 1))
        return self.out.forward_split_k(values.flatten(1))


@dataclass(frozen=True)
class Indexer:
    """The projections of one layer's indexer.

    query: of normed latents of queries, to [N, index_heads * index_dim]. head_weights: [index_heads, hidden_size],
    which loading does not round (Weights.unrounded). interleaved: the rotary layout of GLM; DeepSeek-V3.2's is
    half-split.
    """

    key_norm: LayerNorm
    query: Linear
    head_weights: torch.Tensor
    interleaved: bool

    @classmethod
    def load(cls, weights: Weights, name: str, config: NetworkConfig) -> "Indexer":
        """The indexer of that name, such as `model.layers.0.self_attn.indexer`."""
        key_norm = LayerNorm(
            weights.tensor(f"{name}.k_norm.weight", (config.index_dim,)),
            weights.tensor(f"{name}.k_norm.bias", (config.index_dim,)),
            _NORM_EPS,
        )
        return cls(
            key_norm=key_norm,
            query=weights.linear({f"{name}.wq_b": config.index_heads * config.index_dim}, config.query_rank),
            head_weights=weights.unrounded(f"{name}.weights_proj.weight", (config.index_heads, config.hidden_size)),
            interleaved=config.index_interleaved,
        )

    def queries(self, hidden: torch.Tensor, latents: Activations, rope: Rope) -> IndexQueries:
        """Queries, of normed latents, and head weights, of normed hidden states."""
        heads, ops = len(self.head_weights), ops_for(hidden)
        weights = ops.float32_product(hidden, self.head_weights, heads**-0.5)
        rotated, rest = self.query(latents).view(len(hidden), heads, -1).tensor_split((rope.dim,), dim=-1)
        queries = ops.rotate(rotated, rest, rope, interleaved=self.interleaved, beside_first=False)
        return IndexQueries(queries, weights)
