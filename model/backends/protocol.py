"""The interface of attention backends, which write KV, select positions and attend to their rows."""

from typing import Protocol

import torch

from kvcache.format import KVFormat
from model.cache import PagedKeys
from model.indexer import IndexQueries
from model.norm import LayerNorm, RmsNorm
from model.rope import Rope


class AttentionBackend(Protocol):
    """The part of sparse attention that has kernels of its own. Stateless and deterministic."""

    name: str
    format: KVFormat
    """The format of the items and index keys that it reads."""

    def encode_items(self, compressed: torch.Tensor, norm: RmsNorm, rope: Rope) -> torch.Tensor:
        """Items as pools store them, uint8 [N, item_bytes].

        compressed: [N, latent_dim + rope_dim], what `kv_a_proj_with_mqa` computes. norm: of the latent.
        """
        ...

    def encode_index_keys(
        self, projected: torch.Tensor, norm: LayerNorm, rope: Rope, interleaved: bool
    ) -> torch.Tensor:
        """Index keys as pools store them, uint8 [N, index_key_bytes].

        projected: [N, index_dim], what `wk` computes. interleaved: see Rope.rotate.
        """
        ...

    def attend_rows(
        self, queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
    ) -> torch.Tensor:
        """Attend each query to its own rows of a pool.

        queries: [N, heads, item_dim]. kv: uint8 [num_rows, item_bytes]. rows: int64 [N, k], -1 where there is none. The
        first row of a query exists, unless it has no rows at all; then its result is finite and meaningless. Returns
        the attended latents, [N, heads, latent_dim], in the dtype of the queries.
        """
        ...

    def select_for_prompt(
        self, index: IndexQueries, keys: torch.Tensor, start: int, sequence_length: int, topk: int
    ) -> torch.Tensor:
        """Select for the T queries at positions [start, start + T) of a prompt.

        keys: uint8 [start + T, index_key_bytes], of all positions so far. Returns int64 positions [T, k] in any order,
        where k is at least min(topk, start + T) and at most topk; -1 where a query has fewer positions before it.
        """
        ...

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        """Select for one query of each request of a batch, over the request's whole sequence.

        Returns int64 positions [batch, k] in any order, where k is at least min(topk, longest sequence) and 1, and at
        most topk; -1 where a sequence is shorter. Where `pages.lengths` is None nothing waits for the device.
        """
        ...
