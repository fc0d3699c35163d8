"""The lightning indexer's projections: what a token's selection is made from (DeepSeek-V3.2, section 2.1)."""

from dataclasses import dataclass
from typing import Any

import torch

from model.rope import Rope


@dataclass(frozen=True)
class IndexInputs:
    """What one indexer derives from N tokens' hidden states.

    queries: [N, index_heads, index_dim]. head_weights: float32 [N, index_heads]. keys: [N, index_dim], to be cached.
    """

    queries: torch.Tensor
    head_weights: torch.Tensor
    keys: torch.Tensor


class Indexer:
    """The projections of one transformers DSA indexer module.

    The families differ in the rotary layout: `interleaved` is GLM's, half-split is DeepSeek-V3.2's.
    """

    def __init__(self, module: Any, interleaved: bool) -> None:
        self._module = module
        self._interleaved = interleaved

    def project(self, hidden: torch.Tensor, query_latents: torch.Tensor, rope: Rope) -> IndexInputs:
        """Queries, head weights and keys of normed hidden states [N, hidden_size]."""
        module = self._module
        queries = module.wq_b(query_latents).view(len(hidden), module.n_heads, module.head_dim)
        keys = module.k_norm(module.wk(hidden)).unsqueeze(1)
        # transformers keeps this projection in float32 in a bfloat16 model.
        head_weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype))
        return IndexInputs(
            queries=self._rotate(queries, rope),
            head_weights=head_weights.float() * module.n_heads**-0.5,
            keys=self._rotate(keys, rope).squeeze(1),
        )

    def _rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        rope_dim = self._module.qk_rope_head_dim
        roped, passed = x[..., :rope_dim], x[..., rope_dim:]
        roped = rope.interleaved(roped) if self._interleaved else rope.half_split(roped)
        return torch.cat((roped, passed), dim=-1)
