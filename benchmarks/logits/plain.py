"""A sparse-attention network in plain torch, in float32 or in the arithmetic of published inference code.

Written for comparison, from the names of the published checkpoints, without the network and the kernels of this
project. What it shares with them are definitions: the configuration, products in block-fp8 (`kernels.fp8`), and the
bytes of KV in fp8 (`kvcache.format`).

The published arithmetic is that of inference/model.py and kernel.py of DeepSeek-V3.2-Exp: activations in bfloat16,
quantised for each product with a block-fp8 weight; norms, rotation, router, scores, softmax and the sum of experts in
float32, rounded once; attention in latent space, with weights and items in bfloat16. With KV in fp8, items and index
keys are what is read back of their bytes, and index queries are rotated and quantised, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import fp8
from kvcache.format import Fp8Format
from model.config import NetworkConfig
from model.families import LayerKind

_BLOCK_BYTES = 512 << 20
"""Of the scores of some queries, over all heads."""
_EPS = 1e-6
"""Of the norms of latents and index keys."""


@dataclass(frozen=True)
class Arithmetic:
    """dtype: of activations. quantises: activations, for products with weights in block-fp8; else these are
    dequantised. kv: the format in which KV is kept; None: in dtype."""

    dtype: torch.dtype
    quantises: bool
    kv: Fp8Format | None = None


EXACT = Arithmetic(torch.float32, quantises=False)


class PlainNetwork:
    """A network of published tensors, by name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: NetworkConfig, arithmetic: Arithmetic) -> None:
        self._tensors = tensors
        self._config = config
        self._arithmetic = arithmetic
        self._power_of_two = config.quantization is not None and config.quantization.power_of_two

    @torch.no_grad()
    def logits(self, token_ids: torch.Tensor, last: int) -> torch.Tensor:
        """Float32 logits [last, vocab_size] behind each of the `last` tokens of a text, int64 [T] on the device."""
        config = self._config
        hidden = self._rounded(F.embedding(token_ids, self._tensors["model.embed_tokens.weight"]))
        angles = torch.arange(len(token_ids), device=hidden.device, dtype=torch.float32).unsqueeze(1)
        angles = angles * torch.tensor(config.rope.frequencies, device=hidden.device)
        rope = torch.polar(torch.full_like(angles, config.rope.scale), angles)
        chosen = torch.empty(0)
        for number, kind in enumerate(config.layers):
            name = f"model.layers.{number}"
            normed = self._norm(hidden, f"{name}.input_layernorm", config.norm_eps)
            latents = self._norm(self._linear(normed, f"{name}.self_attn.q_a_proj"), f"{name}.self_attn.q_a_layernorm")
            if kind.indexer:
                chosen = self._selected(normed, latents, rope, f"{name}.self_attn.indexer")
            hidden = hidden + self._attention(normed, latents, rope, chosen, f"{name}.self_attn")
            normed = self._norm(hidden, f"{name}.post_attention_layernorm", config.norm_eps)
            hidden = hidden + self._mlp(normed, kind, f"{name}.mlp")
        hidden = self._norm(hidden[-last:], "model.norm", config.norm_eps)
        return F.linear(hidden, self._rounded(self._tensors["lm_head.weight"])).float()

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._arithmetic.dtype)

    def _weight(self, name: str) -> torch.Tensor:
        """A weight in the dtype of activations, dequantised."""
        weight, scales = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.weight_scale_inv")
        return self._rounded(weight) if scales is None else fp8.dequantise(weight, scales, self._arithmetic.dtype)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, scales = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.weight_scale_inv")
        if scales is None or not self._arithmetic.quantises:
            return F.linear(x, self._weight(name))
        return fp8.linear(x, weight, scales, self._power_of_two)

    def _norm(self, x: torch.Tensor, name: str, eps: float = _EPS) -> torch.Tensor:
        weight = self._tensors[f"{name}.weight"].float()
        return self._rounded(F.rms_norm(x.float(), weight.shape, weight, eps))

    def _rotated(self, x: torch.Tensor, rope: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """x, [T, heads, rope_dim], by complex numbers [T, rope_dim / 2]; first members before second ones."""
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = torch.complex(first.float(), second.float()) * rope.unsqueeze(1)
        return self._rounded(torch.cat((turned.real, turned.imag), -1))

    def _selected(self, normed: torch.Tensor, latents: torch.Tensor, rope: torch.Tensor, name: str) -> torch.Tensor:
        """Which positions each token attends to, boolean [T, T]."""
        config, tokens = self._config, len(normed)
        heads, dim, rope_dim = config.index_heads, config.index_dim, config.rope_dim
        queries = self._linear(latents, f"{name}.wq_b").view(tokens, heads, dim)
        key_norm = self._tensors[f"{name}.k_norm.weight"].float(), self._tensors[f"{name}.k_norm.bias"].float()
        keys = self._rounded(F.layer_norm(self._linear(normed, f"{name}.wk").float(), (dim,), *key_norm, _EPS))

        def positioned(x: torch.Tensor) -> torch.Tensor:
            turned = self._rotated(x[..., :rope_dim], rope, config.index_interleaved)
            return torch.cat((turned, x[..., rope_dim:]), -1)

        queries, keys = positioned(queries).float(), positioned(keys.unsqueeze(1)).squeeze(1).float()
        if kv := self._arithmetic.kv:
            keys = kv.index_keys(kv.encode_index_keys(keys))
            values, scales = fp8.quantise_activations(kv.index_queries(queries).view(-1, dim), self._power_of_two)
            assert scales.shape[1] == 1, "a head's query has one scale"
            queries = (values.float() * scales).view(tokens, heads, dim)
        weights = F.linear(normed.float(), self._tensors[f"{name}.weights_proj.weight"].float()) * heads**-0.5
        selected = torch.empty(tokens, tokens, dtype=torch.bool, device=normed.device)
        step = max(1, _BLOCK_BYTES // (4 * heads * tokens))
        for begin in range(0, tokens, step):
            part = slice(begin, begin + step)
            per_head = (queries[part] @ keys.t() * dim**-0.5).relu()
            scores = (weights[part].unsqueeze(1) @ per_head).squeeze(1)
            causal = self._causal(part, tokens)
            best = scores.masked_fill(~causal, float("-inf")).topk(min(config.index_topk, tokens)).indices
            selected[part] = torch.zeros_like(causal).scatter_(1, best, True) & causal
        return selected

    def _causal(self, queries: slice, tokens: int) -> torch.Tensor:
        """Which positions are not behind those of the queries, boolean [queries, tokens]."""
        position = torch.arange(tokens, device=self._tensors["model.norm.weight"].device)
        return position <= position[queries].unsqueeze(1)

    def _attention(
        self, normed: torch.Tensor, latents: torch.Tensor, rope: torch.Tensor, selected: torch.Tensor, name: str
    ) -> torch.Tensor:
        config, tokens = self._config, len(normed)
        heads, latent_dim = config.heads, config.latent_dim
        per_head = self._weight(f"{name}.kv_b_proj").view(heads, -1, latent_dim)
        key_map, value_map = per_head[:, : config.nope_dim], per_head[:, config.nope_dim :]
        queries = self._linear(latents, f"{name}.q_b_proj").view(tokens, heads, -1)
        turned = self._rotated(queries[..., config.nope_dim :], rope, interleaved=True)
        absorbed = torch.einsum("nhd,hdr->nhr", queries[..., : config.nope_dim], key_map)
        queries = torch.cat((absorbed, turned), -1).transpose(0, 1)

        compressed = self._linear(normed, f"{name}.kv_a_proj_with_mqa")
        latent = self._norm(compressed[:, :latent_dim], f"{name}.kv_a_layernorm")
        key_rope = self._rotated(compressed[:, None, latent_dim:], rope, interleaved=True).squeeze(1)
        items = torch.cat((latent, key_rope), -1)
        if kv := self._arithmetic.kv:
            items = self._rounded(kv.items(kv.encode_items(items)))

        attended = latents.new_empty(heads, tokens, latent_dim)
        step = max(1, _BLOCK_BYTES // (4 * heads * tokens))
        for begin in range(0, tokens, step):
            part = slice(begin, begin + step)
            # Products of bfloat16 numbers are exact in float32.
            scores = queries[:, part].float() @ items.float().t() * config.scaling
            weights = scores.masked_fill_(~selected[part], float("-inf")).softmax(-1)
            attended[:, part] = self._rounded(self._rounded(weights).float() @ items[:, :latent_dim].float())
        values = torch.bmm(attended, value_map.transpose(1, 2))
        return self._linear(values.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def _mlp(self, x: torch.Tensor, kind: LayerKind, name: str) -> torch.Tensor:
        if not kind.mixture:
            return self._feed_forward(x, name)
        weights, ids = self._routed(x, f"{name}.gate")
        total = self._feed_forward(x, f"{name}.shared_experts").float()
        for expert in range(self._config.router.experts):
            token, choice = torch.where(ids == expert)
            if len(token):
                computed = self._feed_forward(x[token], f"{name}.experts.{expert}").float()
                total[token] += computed * weights[token, choice, None]
        return self._rounded(total)

    def _feed_forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self._linear(x, f"{name}.gate_proj").float(), self._linear(x, f"{name}.up_proj").float()
        return self._linear(self._rounded(F.silu(gate) * up), f"{name}.down_proj")

    def _routed(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and ids of each token's experts, both [T, top_k]."""
        router = self._config.router
        scores = F.linear(x.float(), self._tensors[f"{name}.weight"].float()).sigmoid()
        ranked = scores + self._tensors[f"{name}.e_score_correction_bias"].float()
        groups = ranked.view(len(x), router.groups, -1)
        best = groups.topk(2).values.sum(-1).topk(router.top_groups).indices
        open_to_it = torch.zeros(groups.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, True)
        ids = groups.masked_fill(~open_to_it.unsqueeze(-1), float("-inf")).flatten(1).topk(router.top_k).indices
        weights = scores.gather(1, ids)
        if router.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * router.scale, ids
