"""The projections of the lightning indexer, which scores positions for selection (DeepSeek-V3.2, section 2.1)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.config import NetworkConfig
from model.norm import LayerNorm
from model.rope import Rope
from model.weights import Weights

_KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class IndexQueries:
    """The indexer's queries of N tokens.

    queries: [N, index_heads, index_dim]. head_weights: float32 [N, index_heads].
    """

    queries: torch.Tensor
    head_weights: torch.Tensor

    def __getitem__(self, tokens: slice) -> "IndexQueries":
        """The queries of some of the tokens."""
        return IndexQueries(self.queries[tokens], self.head_weights[tokens])


@dataclass(frozen=True)
class Indexer:
    """The projections of one layer's indexer.

    head_weights: float32 [index_heads, hidden_size], unquantised in every checkpoint. interleaved: the rotary layout of
    GLM; DeepSeek-V3.2's is half-split.
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
            head_weights=weights.tensor(
                f"{name}.weights_proj.weight", (config.index_heads, config.hidden_size), torch.float32
            ),
            interleaved=config.index_interleaved,
        )

    @property
    def query_rows(self) -> int:
        """index_heads * index_dim."""
        return len(self.head_weights) * self.key_norm.weight.numel()

    def queries(self, hidden: torch.Tensor, projected: torch.Tensor, rope: Rope) -> IndexQueries:
        """Queries, of what `wq_b` makes [N, index_heads * index_dim], and head weights, of normed hidden states."""
        heads = len(self.head_weights)
        queries = projected.view(len(projected), heads, -1)
        weights = F.linear(hidden.float(), self.head_weights)
        return IndexQueries(_rotated(queries, rope, self.interleaved), weights * heads**-0.5)


def index_keys_of(projected: torch.Tensor, norm: LayerNorm, rope: Rope, interleaved: bool) -> torch.Tensor:
    """The index keys of projected hidden states (wk), both [N, index_dim]."""
    return _rotated(norm(projected).unsqueeze(1), rope, interleaved).squeeze(1)


def _rotated(x: torch.Tensor, rope: Rope, interleaved: bool) -> torch.Tensor:
    """Rotates the first elements of x, [N, heads, index_dim]."""
    return rope.rotate(x[..., : rope.dim], x[..., rope.dim :], interleaved=interleaved, beside_first=False)
