"""Sparse attention by Triton kernels, and top-k by a kernel of csrc/. See `kernels.attention.AttentionBackend`."""

import torch

from kernels.attention import AttentionBackend
from kernels.kv_format import Fp8Layout, KVFormat
from kernels.operands import IndexQueries, LayerNorm, PagedKeys, RmsNorm, Rope
from kernels.top_k import top_positions
from kernels.triton.attend import attend_fp8_rows, attend_rows, fits_cuda_kernel
from kernels.triton.encode import decode_items, encode_index_keys, encode_index_queries, encode_items
from kernels.triton.index_scores import StoredKeys, decode_scores, prompt_scores

# Bounds the scores of one block of a prompt's queries, so that memory is linear in the length of the context.
SCORE_BLOCK_BYTES = 64 << 20
_MANY_TIMES = 16  # that an item is selected, so that to decode it first takes less


class TritonBackend(AttentionBackend):
    """KV as vectors of the network's type, encoded by torch. Never waits for the device.

    Of equal scores it selects the first, which may differ from what the torch backend selects.
    """

    name = "triton"

    def attend_rows(
        self, queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
    ) -> torch.Tensor:
        return attend_rows(queries, self.format.items(kv), rows, scaling, latent_dim)

    def select_for_prompt(
        self, index: IndexQueries, keys: torch.Tensor, start: int, sequence_length: int, topk: int
    ) -> torch.Tensor:
        """k is min(topk, start + T)."""
        num_queries, num_keys = len(index.queries), len(keys)
        index, stored = self._multiplied(index, keys)
        block = max(1, SCORE_BLOCK_BYTES // (4 * num_keys))
        lengths = torch.arange(start + 1, start + 1 + num_queries, device=keys.device)
        positions = torch.empty(num_queries, min(topk, num_keys), dtype=torch.int64, device=keys.device)
        for begin in range(0, num_queries, block):
            part = slice(begin, begin + block)
            top_positions(prompt_scores(index[part], stored, start + begin), topk, lengths[part], positions[part])
        return positions

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        """k is min(topk, positions that the page table has room for), whatever the lengths."""
        index, stored = self._multiplied(index, pages.keys)
        return top_positions(decode_scores(index, pages, stored), topk, pages.seq_lens)

    def _multiplied(self, index: IndexQueries, keys: torch.Tensor) -> tuple[IndexQueries, StoredKeys]:
        """Queries and stored keys, uint8 [..., index_key_bytes], as kernels multiply them."""
        return IndexQueries.of(index.queries, index.head_weights), StoredKeys(self.format.index_keys(keys))


class Fp8TritonBackend(TritonBackend):
    """KV in fp8, which kernels write and read as it is stored."""

    def __init__(self, kv_format: KVFormat, layout: Fp8Layout) -> None:
        super().__init__(kv_format)
        self._layout = layout

    def encode_items(self, compressed: torch.Tensor, norm: RmsNorm, rope: Rope) -> torch.Tensor:
        return encode_items(compressed, norm, rope, self._layout)

    def encode_index_keys(
        self, projected: torch.Tensor, norm: LayerNorm, rope: Rope, interleaved: bool
    ) -> torch.Tensor:
        return encode_index_keys(projected, norm, rope, interleaved, self._layout)

    def attend_rows(
        self, queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
    ) -> torch.Tensor:
        return attend_fp8_rows(queries, kv, rows, scaling, self._layout)

    def attend_prompt(
        self,
        queries: torch.Tensor,
        kv: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        scaling: float,
        latent_dim: int,
    ) -> torch.Tensor:
        """If queries select an item many times, all are decoded to bfloat16 first."""
        if positions.numel() < _MANY_TIMES * len(rows) or not fits_cuda_kernel(queries, latent_dim):
            return super().attend_prompt(queries, kv, rows, positions, scaling, latent_dim)
        items = decode_items(kv, rows[:-1], self._layout)
        return attend_rows(queries, items, positions, scaling, latent_dim)

    def _multiplied(self, index: IndexQueries, keys: torch.Tensor) -> tuple[IndexQueries, StoredKeys]:
        return encode_index_queries(index), StoredKeys.fp8(keys.contiguous(), self._layout.index_dim)


def backend_for(kv_format: KVFormat) -> TritonBackend:
    """The backend that reads a format (`KVFormat.triton_refusal`)."""
    layout = kv_format.fp8_layout
    return TritonBackend(kv_format) if layout is None else Fp8TritonBackend(kv_format, layout)
