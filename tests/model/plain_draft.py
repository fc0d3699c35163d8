"""The multi-token prediction layer by its published formula (DeepSeek-V3, section 2.2; DeepSeek-V3.2, section 2.1).

In float32, with the keys and values of all heads and a mask for what is selected, and without anything of the product.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]


class PlainDraft:
    """The layer of a checkpoint directory with weights in float32.

    `inputs`: what the layer has been given for the positions so far, [T, hidden_size].
    """

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        weights = load_file(path / "model.safetensors")
        prefix = f"model.layers.{self.config['num_hidden_layers']}."
        self._weights = {name.removeprefix(prefix): values.float() for name, values in weights.items()}
        self.inputs = torch.empty(0, self.config["hidden_size"])

    def add(self, next_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """The next positions, of which the tokens after them and the hidden states are known."""
        embedded = self._weights["model.embed_tokens.weight"][next_ids]
        both = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", hidden)), dim=-1)
        self.inputs = torch.cat((self.inputs, both @ self._weights["eh_proj.weight"].T))

    def outputs(self, reused: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of all positions, [T, hidden_size], and which positions each attends to, boolean [T, T].

        reused: those of the last position.
        """
        normed = self._norm("input_layernorm", self.inputs)
        latents = self._norm("self_attn.q_a_layernorm", self._map("self_attn.q_a_proj", normed), 1e-6)
        selected = self._selected(normed, latents)
        if reused is not None:
            selected[-1] = F.pad(reused, (0, selected.shape[1] - len(reused)))
        hidden = self.inputs + self._attention(normed, latents, selected)
        hidden = hidden + self._mixture(self._norm("post_attention_layernorm", hidden))
        return self._norm("shared_head.norm", hidden), selected

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._weights["lm_head.weight"].T

    def _map(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._weights[f"{name}.weight"].T

    def _norm(self, name: str, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        scale = x.pow(2).mean(-1, keepdim=True) + (self.config["rms_norm_eps"] if eps is None else eps)
        return x / scale.sqrt() * self._weights[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """x, [T, heads, dim], each pair by its angle; first members before second ones."""
        dim, theta = x.shape[-1], self.config["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(len(x)).float(), theta ** (-torch.arange(0, dim, 2).float() / dim))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : dim // 2], x[..., dim // 2 :])
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _selected(self, normed: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        c, tokens = self.config, len(normed)
        rope, dim, interleaved = c["qk_rope_head_dim"], c["index_head_dim"], c["model_type"] == "glm_moe_dsa"
        queries = self._map("self_attn.indexer.wq_b", latents).view(tokens, -1, dim)
        keys = self._map("self_attn.indexer.wk", normed)
        norm = (self._weights[f"self_attn.indexer.k_norm.{part}"] for part in ("weight", "bias"))
        keys = F.layer_norm(keys, (dim,), *norm, 1e-6)[:, None]
        queries, keys = (
            torch.cat((self._rotated(x[..., :rope], interleaved), x[..., rope:]), dim=-1) for x in (queries, keys)
        )
        weights = self._map("self_attn.indexer.weights_proj", normed)
        scores = torch.einsum("qhd,kd->qhk", queries, keys[:, 0]).relu()
        scores = torch.einsum("qhk,qh->qk", scores, weights) * (dim * queries.shape[1]) ** -0.5
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        best = scores.masked_fill(~causal, float("-inf")).topk(min(c["index_topk"], tokens)).indices
        return torch.zeros_like(causal).scatter_(1, best, True) & causal

    def _attention(self, normed: torch.Tensor, latents: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        c, tokens = self.config, len(normed)
        heads, nope, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
        queries = self._map("self_attn.q_b_proj", latents).view(tokens, heads, -1)
        queries = torch.cat((queries[..., :nope], self._rotated(queries[..., nope:], interleaved=True)), dim=-1)
        compressed = self._map("self_attn.kv_a_proj_with_mqa", normed)
        latent = self._norm("self_attn.kv_a_layernorm", compressed[:, :rank], 1e-6)
        per_head = self._map("self_attn.kv_b_proj", latent).view(tokens, heads, -1)
        shared = self._rotated(compressed[:, None, rank:], interleaved=True).expand(-1, heads, -1)
        keys, values = torch.cat((per_head[..., :nope], shared), dim=-1), per_head[..., nope:]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(~selected, float("-inf")).softmax(-1)
        return self._map("self_attn.o_proj", torch.einsum("hqk,khd->qhd", weights, values).flatten(1))

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        """Of one group of experts."""
        c = self.config
        scores = self._map("mlp.gate", x).sigmoid()
        chosen = (scores + self._weights["mlp.gate.e_score_correction_bias"]).topk(c["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = c["routed_scaling_factor"] * weights / weights.sum(-1, keepdim=True)
        total = self._feed_forward("mlp.shared_experts", x)
        for token in range(len(x)):
            for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
                total[token] += weight * self._feed_forward(f"mlp.experts.{expert}", x[token])
        return total

    def _feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._map(
            f"{name}.down_proj", F.silu(self._map(f"{name}.gate_proj", x)) * self._map(f"{name}.up_proj", x)
        )
