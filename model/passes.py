"""How attention reaches the KV in a forward pass: through a prompt's pages, or through swap-in when decoding.

Both store the new tokens' items and index keys first, so that a token can select itself, then select positions, find
their rows and attend to them. A layer without an indexer selects what the layer before it selected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from model.backends.protocol import AttentionBackend
from model.cache import DecodeCache, PrefillCache
from model.indexer import IndexInputs


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive prompt tokens of one request; everything before them is in the cache already.

    token_ids: int64 [T] on any device, at positions [start, start + T). prompt_len: tokens of the whole prompt.
    """

    token_ids: torch.Tensor
    start: int
    prompt_len: int
    cache: PrefillCache

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class LayerInputs:
    """One layer's part in a pass. `index` is None where the layer reuses the selection of the one before it."""

    layer: int
    index_layer: int
    queries: torch.Tensor
    items: torch.Tensor
    index: IndexInputs | None
    scaling: float
    latent_dim: int


class ForwardPass(Protocol):
    """The attention of one forward pass, called once per layer in order."""

    def attend(self, inputs: LayerInputs) -> torch.Tensor:
        """Store the new tokens and return the attended latents, shape [N, heads, latent_dim]."""
        ...


class PrefillPass:
    """Chunks of several prompts, whose tokens are concatenated in the order of the chunks."""

    def __init__(self, chunks: Sequence[PrefillChunk], topk: int, backend: AttentionBackend) -> None:
        self._requests = [_PrefillRequest(chunk, topk, backend) for chunk in chunks]
        self._lengths = [len(chunk.token_ids) for chunk in chunks]

    def attend(self, inputs: LayerInputs) -> torch.Tensor:
        latents, begin = [], 0
        for request, length in zip(self._requests, self._lengths, strict=True):
            latents.append(request.attend(inputs, slice(begin, begin + length)))
            begin += length
        return torch.cat(latents)


class _PrefillRequest:
    def __init__(self, chunk: PrefillChunk, topk: int, backend: AttentionBackend) -> None:
        self._chunk = chunk
        self._topk = topk
        self._backend = backend
        self._rows = chunk.cache.rows(0, chunk.stop)
        self._new_rows = self._rows[chunk.start :]
        self._selected_rows: torch.Tensor | None = None

    def attend(self, inputs: LayerInputs, tokens: slice) -> torch.Tensor:
        kv = self._chunk.cache.kv(inputs.layer)
        kv[self._new_rows] = inputs.items[tokens]
        if inputs.index is not None:
            self._selected_rows = self._select(inputs.index_layer, inputs.index, tokens)
        assert self._selected_rows is not None, "the first layer has an indexer"
        queries = inputs.queries[tokens]
        return self._backend.attend_rows(queries, kv, self._selected_rows, inputs.scaling, inputs.latent_dim)

    def _select(self, index_layer: int, index: IndexInputs, tokens: slice) -> torch.Tensor:
        chunk = self._chunk
        mine = IndexInputs(index.queries[tokens], index.head_weights[tokens], index.keys[tokens])
        pool = chunk.cache.index_keys(index_layer)
        pool[self._new_rows] = mine.keys
        keys = pool[self._rows]
        positions = self._backend.select_for_prompt(mine, keys, chunk.start, chunk.prompt_len, self._topk)
        return torch.where(positions < 0, -1, self._rows[positions.clamp(min=0)])


class DecodePass:
    """One new token of each request of a batch."""

    def __init__(self, cache: DecodeCache, topk: int, backend: AttentionBackend) -> None:
        self._cache = cache
        self._topk = topk
        self._backend = backend
        self._positions: torch.Tensor | None = None

    def attend(self, inputs: LayerInputs) -> torch.Tensor:
        cache = self._cache
        cache.append(inputs.layer, inputs.items)
        if inputs.index is not None:
            cache.append_index_keys(inputs.index_layer, inputs.index.keys)
            pages = cache.index_pages(inputs.index_layer)
            self._positions = self._backend.select_for_decode(inputs.index, pages, self._topk)
        assert self._positions is not None, "the first layer has an indexer"
        # Also where the positions are shared: each layer has items of its own to fetch.
        rows = cache.swap_in(inputs.layer, self._positions)
        kv = cache.kv(inputs.layer)
        return self._backend.attend_rows(inputs.queries, kv, rows, inputs.scaling, inputs.latent_dim)
