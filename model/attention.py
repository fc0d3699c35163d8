"""The projections of multi-head latent attention, which is computed in latent space.

Keys and values of all heads are linear maps of one cached latent per token. Instead of expanding the latent, the key
map is absorbed into the query and the value map is applied to the attention output (DeepSeek-V2, arXiv:2405.04434,
section 2.1.2). A cached item is `[normed latent | roped key]`, and all heads read the same items.
"""

from typing import Any

import torch

from model.norm import rms_norm
from model.rope import Rope


class LatentAttention:
    """The projections of one transformers DSA attention module, before and after the attention itself."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.scaling: float = module.scaling
        self._latent_dim: int = module.kv_lora_rank
        self._nope_dim: int = module.qk_nope_head_dim
        self._rope_dim: int = module.qk_rope_head_dim
        per_head = module.kv_b_proj.weight.view(-1, self._nope_dim + module.v_head_dim, self._latent_dim)
        self._key_map = per_head[:, : self._nope_dim]
        self._value_map = per_head[:, self._nope_dim :]

    def items(self, hidden: torch.Tensor, rope: Rope) -> torch.Tensor:
        """The KV items [N, item_dim] of normed hidden states [N, hidden_size]."""
        compressed = self._module.kv_a_proj_with_mqa(hidden).unsqueeze(1)
        latent, key_rope = compressed.split((self._latent_dim, self._rope_dim), dim=-1)
        normed = rms_norm(latent, self._module.kv_a_layernorm)
        return rope.rotate(key_rope, normed, interleaved=True, beside_first=True).squeeze(1)

    def queries(self, hidden: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed queries [N, heads, item_dim] of normed hidden states [N, hidden_size], to be compared with items,
        and the latents [N, q_lora_rank] that they are made from, for the indexer."""
        module = self._module
        latents = rms_norm(module.q_a_proj(hidden), module.q_a_layernorm)
        queries = module.q_b_proj(latents).view(len(hidden), -1, self._nope_dim + self._rope_dim)
        query_nope, query_rope = queries.split((self._nope_dim, self._rope_dim), dim=-1)
        absorbed = torch.einsum("nhd,hdr->nhr", query_nope, self._key_map)
        return rope.rotate(query_rope, absorbed, interleaved=True, beside_first=True), latents

    def output(self, latents: torch.Tensor) -> torch.Tensor:
        """Map each head's attended latent, shape [N, heads, latent_dim], to hidden states [N, hidden_size]."""
        values = latents.new_empty(*latents.shape[:2], self._value_map.shape[1])
        torch.bmm(latents.transpose(0, 1), self._value_map.transpose(1, 2), out=values.transpose(0, 1))
        return self._module.o_proj(values.flatten(1))  # type: ignore[no-any-return]
