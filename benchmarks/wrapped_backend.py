"""An attention backend that passes everything on, for benchmarks that change one thing about it."""

import torch

from kernels.attention import AttentionBackend
from kernels.operands import IndexQueries, LayerNorm, PagedKeys, RmsNorm, Rope


class WrappedBackend(AttentionBackend):
    """Attends and selects as `inner` does."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner.format)
        self.name = inner.name
        self.inner = inner

    def encode_items(self, compressed: torch.Tensor, norm: RmsNorm, rope: Rope) -> torch.Tensor:
        return self.inner.encode_items(compressed, norm, rope)

    def encode_index_keys(
        self, projected: torch.Tensor, norm: LayerNorm, rope: Rope, interleaved: bool
    ) -> torch.Tensor:
        return self.inner.encode_index_keys(projected, norm, rope, interleaved)

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
