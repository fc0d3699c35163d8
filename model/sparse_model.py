"""A sparse-attention (DSA) model that runs against KV caches owned by others: only selected rows of them are read."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention import AttentionBackend
from kernels.ops import ops_for
from model.config import ModelSpec
from model.network import Network
from model.passes import DecodeCache, DecodePass, PrefillChunk, PrefillPass

SLICE_BYTES = 64 << 20
"""Float32 logits that are computed at a time: those of a whole chunk would take a gigabyte."""


class TokenLogprobs(NamedTuple):
    """Log probabilities after softmax over the vocabulary, on the model's device.

    own: float32 [n], of the given tokens. ranks: int32 [n], 1 for the likeliest token; equally likely tokens share the
    best rank. top: float32 [n, k], of the likeliest tokens, from the likeliest on. top_ids: int32 [n, k].
    """

    own: torch.Tensor
    ranks: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


class SparseModel:
    """Runs a network. KV is written and read in the format of the attention backend."""

    def __init__(self, network: Network, spec: ModelSpec, backend: AttentionBackend) -> None:
        self.spec = spec
        self.device = network.embedding.device
        self.network = network
        self._backend = backend

    @torch.no_grad()
    def prefill(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None] = lambda _: None) -> None:
        """Compute chunks of prompts and store their KV; at most one chunk per request.

        `on_layer` is called with each layer's number once the work that stores its KV is queued on the device. Nothing
        else of the last layer is computed, since nobody needs its hidden states.
        """
        self._prefill(chunks, on_layer, kv_only=True)

    @torch.no_grad()
    def prefill_hidden(
        self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None] = lambda _: None
    ) -> torch.Tensor:
        """As `prefill`, and the hidden states for `logprobs`, [tokens of all chunks, hidden_size]."""
        return self.network.norm(self._prefill(chunks, on_layer, kv_only=False))

    @torch.no_grad()
    def logprobs(self, hidden: torch.Tensor, next_ids: torch.Tensor, count: int) -> TokenLogprobs:
        """How likely the tokens behind hidden states are, and the `count` likeliest there.

        hidden: [n, hidden_size], of `prefill_hidden`. next_ids: int64 [n] on any device.
        """
        return token_logprobs(hidden, self.network.head, next_ids.to(self.device), count)

    @torch.no_grad()
    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: DecodeCache) -> torch.Tensor:
        """Compute one new token of each request: its id and its position, both int64 [batch].

        Returns float32 logits, shape [batch, vocab_size].
        """
        hidden = self._forward(token_ids, positions, DecodePass(cache, self.spec, self._backend))
        return F.linear(self.network.norm(hidden), self.network.head).float()

    def _prefill(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None], kv_only: bool) -> torch.Tensor:
        token_ids = torch.cat([chunk.token_ids for chunk in chunks]).to(self.device)
        positions = torch.cat([torch.arange(chunk.start, chunk.stop, device=self.device) for chunk in chunks])
        return self._forward(token_ids, positions, PrefillPass(chunks, self.spec, self._backend), on_layer, kv_only)

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
        network, backend = self.network, self._backend
        hidden, addend = F.embedding(token_ids, network.embedding), None
        ops = ops_for(hidden)
        rope = network.config.rope.at(positions, hidden.dtype)
        for number, layer in enumerate(network.layers):
            hidden, normed = ops.add_rms_norm(hidden, addend, layer.input_norm, layer.down.fp8)
            query_latents, index_keys, compressed = layer.project(normed, rope)
            attention, indexer = layer.attention, layer.indexer
            forward_pass.store(number, backend.encode_items(compressed, attention.latent_norm, rope))
            if indexer:
                keys = backend.encode_index_keys(index_keys, indexer.key_norm, rope, indexer.interleaved)
                forward_pass.store_index_keys(number, keys)
            on_layer(number)
            if kv_only and number == len(network.layers) - 1:
                break
            projected_queries, index_queries = layer.project_queries(query_latents)
            queries = attention.queries(projected_queries, rope)
            index = indexer.queries(normed.dense, index_queries, rope) if indexer else None
            attended = forward_pass.attend(number, queries, index, network.config.scaling)
            hidden, addend = layer.mlp.forward_normed(layer.mlp_norm, hidden, attention.output(attended))
        return hidden if addend is None else hidden + addend


def token_logprobs(normed: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, count: int) -> TokenLogprobs:
    """How likely tokens are behind hidden states, and which `count` tokens are the likeliest.

    normed: [n, hidden_size], after the last norm. head: [vocab_size, hidden_size]. token_ids: int64 [n].
    No more than SLICE_BYTES of logits exist at a time, but at least those of one row.
    """
    rows = max(1, SLICE_BYTES // (4 * head.shape[0]))
    slices = zip(torch.split(normed, rows), torch.split(token_ids, rows), strict=True)
    parts = [_of_logits(F.linear(part, head).float(), ids, count) for part, ids in slices]
    return TokenLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def _of_logits(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> TokenLogprobs:
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    best = logits.topk(min(count, logits.shape[1]), dim=-1)
    return TokenLogprobs(
        own=(chosen - log_total).squeeze(1),
        ranks=(logits > chosen).sum(dim=-1, dtype=torch.int32) + 1,
        top=best.values - log_total,
        top_ids=best.indices.int(),
    )
