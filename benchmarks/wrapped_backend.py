"""An attention backend that passes everything on, for benchmarks that change one thing about it."""

import torch

from model.backends.protocol import AttentionBackend
from model.cache import PagedKeys
from model.indexer import IndexQueries


class WrappedBackend:
    """Attends and selects as `inner` does; see AttentionBackend."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.format = inner.format
        self.inner = inner

    def attend_rows(
        self, queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
    ) -> torch.Tensor:
        return self.inner.attend_rows(queries, kv, rows, scaling, latent_dim)

    def select_for_prompt(
        self, index: IndexQueries, keys: torch.Tensor, start: int, sequence_length: int, topk: int
    ) -> torch.Tensor:
        return self.inner.select_for_prompt(index, keys, start, sequence_length, topk)

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        return self.inner.select_for_decode(index, pages, topk)
