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
from model.indexer import IndexQueries


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive prompt tokens of one request; everything before them is in the cache already.

    token_ids: int64 [T] on any device, at positions [start, start + T). sequence_length: tokens of the whole sequence,
    those that are computed elsewhere included; the torch backend scores rows of that length, as transformers does.
    """

    token_ids: torch.Tensor
    start: int
    sequence_length: int
    cache: PrefillCache

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class LayerQueries:
    """What one layer asks for. `index` is None where the layer reuses the selection of the one before it."""

    layer: int
    index_layer: int
    queries: torch.Tensor
    index: IndexQueries | None
    scaling: float
    latent_dim: int


class ForwardPass(Protocol):
    """The KV side of one forward pass, called for each layer in order."""

    def store(self, layer: int, items: torch.Tensor) -> None:
        """Keep the new tokens' KV items, [N, item_dim]."""
        ...

    def store_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        """Keep the new tokens' index keys, [N, index_dim]."""
        ...

    def attend(self, layer: LayerQueries) -> torch.Tensor:
        """Returns the attended latents, shape [N, heads, latent_dim]."""
        ...


class PrefillPass:
    """Chunks of several prompts, whose tokens are concatenated in the order of the chunks."""

    def __init__(self, chunks: Sequence[PrefillChunk], topk: int, backend: AttentionBackend) -> None:
        self._requests: list[tuple[_PrefillRequest, slice]] = []
        begin = 0
        for chunk in chunks:
            end = begin + len(chunk.token_ids)
            self._requests.append((_PrefillRequest(chunk, topk, backend), slice(begin, end)))
            begin = end

    def store(self, layer: int, items: torch.Tensor) -> None:
        for request, tokens in self._requests:
            request.store(layer, items[tokens])

    def store_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        for request, tokens in self._requests:
            request.store_index_keys(index_layer, keys[tokens])

    def attend(self, layer: LayerQueries) -> torch.Tensor:
        return torch.cat([request.attend(layer, tokens) for request, tokens in self._requests])


class _PrefillRequest:
    def __init__(self, chunk: PrefillChunk, topk: int, backend: AttentionBackend) -> None:
        self._chunk = chunk
        self._topk = topk
        self._backend = backend
        self._rows = chunk.cache.rows(0, chunk.stop)
        self._new_rows = self._rows[chunk.start :]
        self._selected_rows: torch.Tensor | None = None

    def store(self, layer: int, items: torch.Tensor) -> None:
        self._chunk.cache.kv(layer)[self._new_rows] = self._backend.format.encode_items(items)

    def store_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        self._chunk.cache.index_keys(index_layer)[self._new_rows] = self._backend.format.encode_index_keys(keys)

    def attend(self, layer: LayerQueries, tokens: slice) -> torch.Tensor:
        if layer.index is not None:
            self._selected_rows = self._select(layer.index_layer, layer.index[tokens])
        assert self._selected_rows is not None, "the first layer has an indexer"
        kv = self._chunk.cache.kv(layer.layer)
        return self._backend.attend_rows(
            layer.queries[tokens], kv, self._selected_rows, layer.scaling, layer.latent_dim
        )

    def _select(self, index_layer: int, index: IndexQueries) -> torch.Tensor:
        chunk = self._chunk
        keys = chunk.cache.index_keys(index_layer)[self._rows]
        positions = self._backend.select_for_prompt(index, keys, chunk.start, chunk.sequence_length, self._topk)
        return torch.where(positions < 0, -1, self._rows[positions.clamp(min=0)])


class DecodePass:
    """One new token of each request of a batch."""

    def __init__(self, cache: DecodeCache, topk: int, backend: AttentionBackend) -> None:
        self._cache = cache
        self._topk = topk
        self._backend = backend
        self._positions: torch.Tensor | None = None

    def store(self, layer: int, items: torch.Tensor) -> None:
        self._cache.append(layer, self._backend.format.encode_items(items))

    def store_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        self._cache.append_index_keys(index_layer, self._backend.format.encode_index_keys(keys))

    def attend(self, layer: LayerQueries) -> torch.Tensor:
        if layer.index is not None:
            pages = self._cache.index_pages(layer.index_layer)
            self._positions = self._backend.select_for_decode(layer.index, pages, self._topk)
        assert self._positions is not None, "the first layer has an indexer"
        # Also where the positions are shared: each layer has items of its own to fetch.
        rows = self._cache.swap_in(layer.layer, self._positions)
        kv = self._cache.kv(layer.layer)
        return self._backend.attend_rows(layer.queries, kv, rows, layer.scaling, layer.latent_dim)
