"""How attention reaches the KV in a forward pass: through a prompt's pages, or through swap-in when decoding.

Both passes are called for each layer in order. They store the new tokens' items and index keys first, so that a token
can select itself. Then they select positions, find their rows and attend to them. A layer without an indexer selects
what the layer before it selected.

The model knows layers and projections, but not where KV lies. It writes and reads *rows* of flat pools: a prefill cache
maps positions to rows, a decode cache swaps positions in and returns their rows. A row is bytes in a
`kernels.kv_format.KVFormat`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import torch

from base.device import SideStream
from kernels.attention import AttentionBackend
from kernels.operands import IndexQueries, PagedKeys
from model.config import ModelSpec


class PrefillCache(Protocol):
    """The paged cache of one request while its prompt is computed."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Pool rows of the positions [start, stop), int64, shape [stop - start]."""

    def kv(self, layer: int) -> torch.Tensor:
        """The layer's KV items, uint8 [num_rows, item_bytes]; the model writes new items into it in place."""

    def index_keys(self, index_layer: int) -> torch.Tensor:
        """The index layer's keys, uint8 [num_rows, index_key_bytes]; the model writes new keys into it in place."""


class DecodeCache(Protocol):
    """A batch of requests of which each computes one new token."""

    def append(self, layer: int, items: torch.Tensor) -> None:
        """Store the new tokens' KV items, uint8 [batch, item_bytes], as the newest position of each request."""

    def append_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        """Store the new tokens' index keys, uint8 [batch, index_key_bytes]."""

    def index_pages(self, index_layer: int) -> PagedKeys:
        """The index keys to score against, new tokens included."""

    def swap_in(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Make the selected positions resident and return their rows.

        positions: int64 [batch, k], -1 where there is none. Returns int64 rows of `kv(layer)`, same shape, -1 for -1.
        """

    def kv(self, layer: int) -> torch.Tensor:
        """The layer's KV items, uint8 [num_rows, item_bytes], to be read at the rows that `swap_in` returned."""


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive prompt tokens of one request; everything before them is in the cache already.

    token_ids: int64 [T] on any device, at positions [start, start + T). next_ids: int64 [T], the token after each of
    them. sequence_length: tokens of the whole sequence, including those that another process computes; the torch
    backend scores rows of that length, as transformers does.
    """

    token_ids: torch.Tensor
    next_ids: torch.Tensor
    start: int
    sequence_length: int
    cache: PrefillCache

    @classmethod
    def of(cls, prompt: torch.Tensor, start: int, stop: int, cache: PrefillCache) -> Self:
        """Tokens [start, stop) of a whole prompt, int64, of which at least the last is computed elsewhere."""
        return cls(prompt[start:stop], prompt[start + 1 : stop + 1], start, len(prompt), cache)

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    def part(self, tokens: range) -> "PrefillChunk":
        """Some of its tokens, counted from its first."""
        part = slice(tokens.start, tokens.stop)
        return replace(
            self, token_ids=self.token_ids[part], next_ids=self.next_ids[part], start=self.start + tokens.start
        )


class PassTokens(NamedTuple):
    """N tokens of a forward pass: their ids, those of the tokens after them, and their positions, all int64 [N]."""

    ids: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], device: torch.device) -> Self:
        """The tokens of all chunks."""
        return cls(
            torch.cat([chunk.token_ids for chunk in chunks]).to(device),
            torch.cat([chunk.next_ids for chunk in chunks]).to(device),
            torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks]),
        )


class DecodePass:
    """New tokens of the requests of a batch."""

    def __init__(
        self,
        cache: DecodeCache,
        spec: ModelSpec,
        backend: AttentionBackend,
        side: SideStream,
        selected: torch.Tensor | None = None,
    ) -> None:
        """selected: the positions that a first layer without index queries attends to."""
        self._cache = cache
        self._side = side
        self._spec = spec
        self._backend = backend
        self.selected = selected
        """The positions that the last layer has attended to, int64 [N, k]."""

    def store(self, layer: int, items: torch.Tensor) -> None:
        """Keep the new tokens' KV items, uint8 [N, item_bytes]."""
        self._cache.append(layer, items)

    def store_index_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Keep the new tokens' index keys, uint8 [N, index_key_bytes]."""
        self._cache.append_index_keys(self._spec.index_layer_of[layer], keys)

    def beside_selection(self) -> AbstractContextManager[None]:
        """A device computes what is called inside at the same time as the next `select`, for the `attend` after it."""
        return self._side.fork()

    def select(self, layer: int, index: IndexQueries | None) -> None:
        """Select the positions to attend to, and have them in the pool. index: None where the layer has no indexer."""
        if index is not None:
            pages = self._cache.index_pages(self._spec.index_layer_of[layer])
            self.selected = self._backend.select_for_decode(index, pages, self._spec.index_topk)
        assert self.selected is not None, "the first layer has an indexer"
        # Also where the positions are shared: each layer has items of its own to fetch.
        self._rows = self._cache.swap_in(layer, self.selected)

    def attend(self, layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what was selected: queries [N, heads, item_dim] to attended latents [N, heads, latent_dim]."""
        self._side.join()
        return self._backend.attend_rows(queries, self._cache.kv(layer), self._rows, scaling, self._spec.latent_dim)


class PrefillPass:
    """Chunks of several prompts, whose tokens are concatenated in the order of the chunks. Methods as in DecodePass."""

    def __init__(self, chunks: Sequence[PrefillChunk], spec: ModelSpec, backend: AttentionBackend) -> None:
        self._requests: list[tuple[_RequestPass, slice]] = []
        begin = 0
        for chunk in chunks:
            end = begin + len(chunk.token_ids)
            self._requests.append((_RequestPass(chunk, spec, backend), slice(begin, end)))
            begin = end

    def store(self, layer: int, items: torch.Tensor) -> None:
        for request, tokens in self._requests:
            request.store(layer, items[tokens])

    def store_index_keys(self, layer: int, keys: torch.Tensor) -> None:
        for request, tokens in self._requests:
            request.store_index_keys(layer, keys[tokens])

    def beside_selection(self) -> AbstractContextManager[None]:
        """Nothing is beside it: either takes the whole device."""
        return nullcontext()

    def select(self, layer: int, index: IndexQueries | None) -> None:
        if index is not None:
            for request, tokens in self._requests:
                request.select(layer, index[tokens])

    def attend(self, layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
        parts = [request.attend(layer, queries[tokens], scaling) for request, tokens in self._requests]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _RequestPass:
    """One chunk of a PrefillPass."""

    def __init__(self, chunk: PrefillChunk, spec: ModelSpec, backend: AttentionBackend) -> None:
        self._chunk = chunk
        self._spec = spec
        self._backend = backend
        self._rows = chunk.cache.rows(0, chunk.stop)
        self._new_rows = self._rows[chunk.start :]
        # By position, and for -1, which is the last entry, -1: one pass over what may be 100 MB.
        self._rows_or_none = torch.cat((self._rows, self._rows.new_full((1,), -1)))
        self._positions: torch.Tensor | None = None

    def store(self, layer: int, items: torch.Tensor) -> None:
        self._chunk.cache.kv(layer)[self._new_rows] = items

    def store_index_keys(self, layer: int, keys: torch.Tensor) -> None:
        self._chunk.cache.index_keys(self._spec.index_layer_of[layer])[self._new_rows] = keys

    def select(self, layer: int, index: IndexQueries) -> None:
        chunk, spec = self._chunk, self._spec
        keys = chunk.cache.index_keys(spec.index_layer_of[layer])[self._rows]
        self._positions = self._backend.select_for_prompt(
            index, keys, chunk.start, chunk.sequence_length, spec.index_topk
        )

    def attend(self, layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
        assert self._positions is not None, "the first layer has an indexer"
        kv, latent_dim = self._chunk.cache.kv(layer), self._spec.latent_dim
        return self._backend.attend_prompt(queries, kv, self._rows_or_none, self._positions, scaling, latent_dim)
