"""The KV caches that the model runs against.

The model knows layers and projections, but not where KV lies. It writes and reads *rows* of flat pools: a prefill cache
maps positions to rows, a decode cache swaps positions in and returns their rows. A row is bytes in a
`kvcache.format.KVFormat`.
"""

from typing import Protocol

import torch

from kernels.operands import PagedKeys


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
