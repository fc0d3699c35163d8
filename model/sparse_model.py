"""A sparse-attention (DSA) model that runs against KV caches owned by others.

Weights, linear layers, dense MLPs and rotary angles are those of the transformers model. Its attention, decoder layers
and caches are not used: KV lies in pools that the caller owns, and only selected rows are read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from model.attention import LatentAttention
from model.backends.protocol import AttentionBackend
from model.cache import DecodeCache
from model.experts import MixtureOfExperts
from model.indexer import Indexer
from model.norm import rms_norm
from model.passes import DecodePass, PrefillChunk, PrefillPass
from model.rope import Rope
from model.shard import WHOLE, Shard
from model.spec import ModelSpec


class SparseModel:
    """Runs a loaded transformers `deepseek_v32` or `glm_moe_dsa` causal language model.

    KV is written and read in the format of the attention backend. `shard`: the part of the experts that this process
    has; the network of transformers has all of them.
    """

    def __init__(self, network: Any, spec: ModelSpec, backend: AttentionBackend, shard: Shard = WHOLE) -> None:
        if shard != WHOLE:
            raise ValueError(f"shard {shard.rank} of {shard.of}: this network computes the whole model")
        self.spec = spec
        self.shard = shard
        self.device: torch.device = network.device
        self._network = network
        self._backend = backend
        interleaved = spec.model_type == "glm_moe_dsa"
        self._layers = [_Layer(module, interleaved) for module in network.model.layers]

    @torch.no_grad()
    def prefill(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None] = lambda _: None) -> None:
        """Compute chunks of prompts and store their KV; at most one chunk per request.

        `on_layer` is called with each layer's number once the work that stores its KV is queued on the device. Nothing
        else of the last layer is computed, since nobody needs its hidden states.
        """
        token_ids = torch.cat([chunk.token_ids for chunk in chunks]).to(self.device)
        positions = torch.cat([torch.arange(chunk.start, chunk.stop, device=self.device) for chunk in chunks])
        self._forward(token_ids, positions, PrefillPass(chunks, self.spec, self._backend), on_layer, kv_only=True)

    @torch.no_grad()
    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: DecodeCache) -> torch.Tensor:
        """Compute one new token of each request: its id and its position, both int64 [batch].

        Returns float32 logits, shape [batch, vocab_size].
        """
        hidden = self._forward(token_ids, positions, DecodePass(cache, self.spec, self._backend))
        logits: torch.Tensor = self._network.lm_head(rms_norm(hidden, self._network.model.norm))
        return logits.float()

    @contextmanager
    def recordable(self) -> Iterator[None]:
        """While it lasts, `decode` waits for nothing, so that it can be recorded in a CUDA graph.

        In other dtypes than bfloat16 torch multiplies grouped matrices one by one, and waits to know their sizes. For
        these dtypes the library's batched variant, which gathers the weights of each token's experts, is used instead.
        """
        chosen = self._network.config._experts_implementation
        if self.spec.dtype != torch.bfloat16:
            self._network.set_experts_implementation("batched_mm")
        try:
            yield
        finally:
            self._network.set_experts_implementation(chosen)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_pass: PrefillPass | DecodePass,
        on_layer: Callable[[int], None] = lambda _: None,
        kv_only: bool = False,
    ) -> torch.Tensor:
        """Hidden states after the last layer, shape [N, hidden_size], of N tokens of any requests.

        With `kv_only` it returns when the last layer's KV is stored, and its result is meaningless.
        """
        hidden: torch.Tensor = self._network.model.embed_tokens(token_ids)
        cos, sin = self._network.model.rotary_emb(hidden, position_ids=positions.unsqueeze(0))
        rope = Rope.from_angles(cos.squeeze(0), sin.squeeze(0))
        for number, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.input_norm)
            forward_pass.store(number, layer.attention.items(normed, rope))
            if layer.indexer:
                forward_pass.store_index_keys(number, layer.indexer.keys(normed, rope))
            on_layer(number)
            if kv_only and number == len(self._layers) - 1:
                break
            queries, query_latents = layer.attention.queries(normed, rope)
            index = layer.indexer.queries(normed, query_latents, rope) if layer.indexer else None
            attended = forward_pass.attend(number, queries, index, layer.attention.scaling)
            hidden = hidden + layer.attention.output(attended)
            hidden = hidden + layer.mlp(rms_norm(hidden, layer.mlp_norm))
        return hidden


class _Layer:
    """The modules of one decoder layer."""

    def __init__(self, module: Any, interleaved: bool) -> None:
        self.input_norm = module.input_layernorm
        self.attention = LatentAttention(module.self_attn)
        indexer = module.self_attn.indexer
        self.indexer = Indexer(indexer, interleaved) if indexer is not None else None
        self.mlp_norm = module.post_attention_layernorm
        self.mlp = MixtureOfExperts(module.mlp) if hasattr(module.mlp, "experts") else module.mlp
