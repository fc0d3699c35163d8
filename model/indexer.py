"""The projections of the lightning indexer, which scores positions for selection (DeepSeek-V3.2, section 2.1)."""

from dataclasses import dataclass
from typing import Any

import torch

from model.rope import Rope


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


class Indexer:
    """The projections of one transformers DSA indexer module.

    The families differ in the rotary layout: `interleaved` is GLM's, half-split is DeepSeek-V3.2's.
    """

    def __init__(self, module: Any, interleaved: bool) -> None:
        self._module = module
        self._interleaved = interleaved

    def keys(self, hidden: torch.Tensor, rope: Rope) -> torch.Tensor:
        """The index keys [N, index_dim] of normed hidden states [N, hidden_size]."""
        keys = self._module.k_norm(self._module.wk(hidden)).unsqueeze(1)
        return self._rotate(keys, rope).squeeze(1)

    def queries(self, hidden: torch.Tensor, query_latents: torch.Tensor, rope: Rope) -> IndexQueries:
        """Queries and head weights of normed hidden states [N, hidden_size]."""
        module = self._module
        queries = module.wq_b(query_latents).view(len(hidden), module.n_heads, module.head_dim)
        # transformers keeps this projection in float32 in a bfloat16 model.
        head_weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype))
        return IndexQueries(self._rotate(queries, rope), head_weights.float() * module.n_heads**-0.5)

    def _rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        rope_dim = self._module.qk_rope_head_dim
        roped, passed = x[..., :rope_dim], x[..., rope_dim:]
        return rope.rotate(roped, passed, interleaved=self._interleaved, beside_first=False)
