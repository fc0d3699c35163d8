"""The projections of the lightning indexer, which scores positions for selection (DeepSeek-V3.2, section 2.1)."""

from dataclasses import dataclass

import torch

from kernels.dispatch import ops_for
from kernels.operands import IndexQueries, LayerNorm, Rope
from model.config import NetworkConfig
from model.weights import Weights

_KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Indexer:
    """The projections of one layer's indexer.

    head_weights: [index_heads, hidden_size], which loading does not round (Weights.unrounded). interleaved: the rotary
    layout of GLM; DeepSeek-V3.2's is half-split.
    """

    key_norm: LayerNorm
    head_weights: torch.Tensor
    interleaved: bool

    @classmethod
    def load(cls, weights: Weights, name: str, config: NetworkConfig) -> "Indexer":
        """The indexer of that name, such as `model.layers.0.self_attn.indexer`."""
        key_norm = LayerNorm(
            weights.tensor(f"{name}.k_norm.weight", (config.index_dim,)),
            weights.tensor(f"{name}.k_norm.bias", (config.index_dim,)),
            _KEY_NORM_EPS,
        )
        return cls(
            key_norm=key_norm,
            head_weights=weights.unrounded(f"{name}.weights_proj.weight", (config.index_heads, config.hidden_size)),
            interleaved=config.index_interleaved,
        )

    @property
    def query_rows(self) -> int:
        """index_heads * index_dim."""
        return len(self.head_weights) * self.key_norm.weight.numel()

    def queries(self, hidden: torch.Tensor, projected: torch.Tensor, rope: Rope) -> IndexQueries:
        """Queries, of what `wq_b` makes [N, index_heads * index_dim], and head weights, of normed hidden states."""
        heads, ops = len(self.head_weights), ops_for(hidden)
        weights = ops.float32_product(hidden, self.head_weights, heads**-0.5)
        rotated, rest = projected.view(len(projected), heads, -1).tensor_split((rope.dim,), dim=-1)
        queries = ops.rotate(rotated, rest, rope, interleaved=self.interleaved, beside_first=False)
        return IndexQueries(queries, weights)
