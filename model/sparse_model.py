"""A sparse-attention (DSA) model that runs against KV caches owned by others: only selected rows of them are read."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F

from base.device import SideStream
from kernels.attention import AttentionBackend
from kernels.operands import Rope
from kernels.ops import ops_for
from model.config import ModelSpec
from model.network import Layer, Network
from model.passes import DecodeCache, DecodePass, PassTokens, PrefillChunk, PrefillPass

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
        self._side = SideStream(self.device)
        self._drafted_from: torch.Tensor | None = None
        """The positions that the last call of `draft` has attended to."""

    @torch.no_grad()
    def prefill(
        self,
        chunks: Sequence[PrefillChunk],
        on_layer: Callable[[int], None] = lambda _: None,
        kv_only: bool = True,
    ) -> torch.Tensor:
        """Compute chunks of prompts and store their KV, that of the draft layer too; at most one chunk per request.

        `on_layer` is called with each layer's number once the work that stores its KV is queued on the device. Returns
        hidden states for `logprobs`, [tokens of all chunks, hidden_size]. kv_only: they are not needed, and nothing
        else of the last layer is computed; what is returned is meaningless.
        """
        tokens = PassTokens.of(chunks, self.device)
        return self._forward_prompts(tokens, PrefillPass(chunks, self.spec, self._backend), on_layer, kv_only)

    @torch.no_grad()
    def logprobs(self, hidden: torch.Tensor, next_ids: torch.Tensor, count: int) -> TokenLogprobs:
        """How likely the tokens behind hidden states are, and the `count` likeliest there.

        hidden: [n, hidden_size], of `prefill`. next_ids: int64 [n] on any device.
        """
        return token_logprobs(hidden, self.network.head, next_ids.to(self.device), count)

    @torch.no_grad()
    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: DecodeCache) -> torch.Tensor:
        """Compute new tokens of requests, without the draft layer: their ids and positions, both int64 [batch].

        Positions below 0 are padding, whose results are meaningless.
        Returns hidden states after the final norm, [batch, hidden_size], for `logits`.
        """
        forward_pass = DecodePass(cache, self.spec, self._backend, self._side)
        return self.network.norm(self._forward(token_ids, positions, forward_pass))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [N, vocab_size], of hidden states of `decode` or `draft`."""
        return F.linear(hidden, self.network.head).float()

    @torch.no_grad()
    def draft(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: DecodeCache,
        picked: torch.Tensor | None,
        reuse: bool = False,
    ) -> torch.Tensor | None:
        """Compute the draft layer for N tokens at int64 positions [N], below 0 for padding.

        next_ids: int64 [N], the token after each. hidden: [N, hidden_size], of `decode` at the same position, or
        where that is not known, what this method returned for the position before. Stores the layer's KV of all N.
        Returns hidden states of the tokens whose numbers are picked, int64 [B], for `logits` of the token after the
        next: [B, hidden_size]. picked None: nothing else is computed. reuse: where the checkpoint says so, the B tokens
        attend to the positions that those of the last call have attended to.
        """
        draft, number = self.network.draft, self.spec.draft_layer
        assert draft is not None, "the model was loaded with its draft layer"
        assert number is not None, "as its specification says"
        shared = self._drafted_from if reuse and self.network.config.drafts_share_selection else None
        forward_pass = DecodePass(cache, self.spec, self._backend, self._side, shared)
        rope = self.network.config.rope.at(positions.clamp(min=0), hidden.dtype)
        inputs = draft.inputs(F.embedding(next_ids, self.network.embedding), hidden)
        stored = self._store(number, draft.layer, inputs, None, rope, forward_pass)
        if picked is None:
            return None
        stored = _Stored(stored.hidden[picked], stored.normed[picked], stored.query_latents[picked])
        rope = Rope(rope.cos[picked], rope.sin[picked])
        own, addend = self._attend(
            number, draft.layer, stored, positions[picked], rope, forward_pass, selects=shared is None
        )
        self._drafted_from = forward_pass.selected
        return draft.norm(own + addend)

    def _forward_prompts(
        self, tokens: PassTokens, forward_pass: PrefillPass, on_layer: Callable[[int], None], kv_only: bool
    ) -> torch.Tensor:
        """Hidden states after the final norm, unless `kv_only`."""
        draft, number = self.network.draft, self.spec.draft_layer
        if draft is None or number is None:
            hidden = self._forward(tokens.ids, tokens.positions, forward_pass, on_layer, kv_only)
            return hidden if kv_only else self.network.norm(hidden)
        hidden = self.network.norm(self._forward(tokens.ids, tokens.positions, forward_pass, on_layer))
        inputs = draft.inputs(F.embedding(tokens.next_ids, self.network.embedding), hidden)
        rope = self.network.config.rope.at(tokens.positions, hidden.dtype)
        self._store(number, draft.layer, inputs, None, rope, forward_pass)
        on_layer(number)
        return hidden

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
        network = self.network
        hidden, addend = F.embedding(token_ids, network.embedding), None
        rope = network.config.rope.at(positions.clamp(min=0), hidden.dtype)
        for number, layer in enumerate(network.layers):
            stored = self._store(number, layer, hidden, addend, rope, forward_pass)
            on_layer(number)
            if kv_only and number == len(network.layers) - 1:
                return hidden
            hidden, addend = self._attend(number, layer, stored, positions, rope, forward_pass)
        return hidden if addend is None else hidden + addend

    def _store(
        self,
        number: int,
        layer: Layer,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        rope: Rope,
        forward_pass: PrefillPass | DecodePass,
    ) -> "_Stored":
        """Store a layer's KV of tokens with the hidden states hidden + addend, and what is left to compute of it."""
        backend, indexer = self._backend, layer.indexer
        hidden, normed = ops_for(hidden).add_rms_norm(hidden, addend, layer.input_norm, layer.down.fp8)
        query_latents, index_keys, compressed = layer.project(normed, rope)
        forward_pass.store(number, backend.encode_items(compressed, layer.attention.latent_norm, rope))
        if indexer:
            keys = backend.encode_index_keys(index_keys, indexer.key_norm, rope, indexer.interleaved)
            forward_pass.store_index_keys(number, keys)
        return _Stored(hidden, normed.dense, query_latents)

    def _attend(
        self,
        number: int,
        layer: Layer,
        stored: "_Stored",
        positions: torch.Tensor,
        rope: Rope,
        forward_pass: PrefillPass | DecodePass,
        selects: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of a layer: hidden states, and what is to be added. selects: with its indexer, if it has one."""
        attention, indexer = layer.attention, layer.indexer if selects else None
        latents = layer.norm_query_latents(stored.query_latents)
        with forward_pass.beside_selection() if indexer else nullcontext():
            queries = attention.queries(layer.query_b(latents), rope)
        forward_pass.select(number, indexer.queries(stored.normed, latents, rope) if indexer else None)
        attended = forward_pass.attend(number, queries, self.network.config.scaling)
        return layer.mlp.forward_normed(layer.mlp_norm, stored.hidden, attention.output(attended), positions)


class _Stored(NamedTuple):
    """Tokens of a layer whose KV is stored: hidden states and normed ones, [N, hidden_size], and latents of queries,
    [N, query_rank]."""

    hidden: torch.Tensor
    normed: torch.Tensor
    query_latents: torch.Tensor


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
