"""Sparse attention by Triton kernels. Imported only where it was chosen: other machines need not have Triton."""

import torch

from hisparse.format import KVFormat
from hisparse.fp8_format import Fp8Format
from model.backends.triton_attend import attend_fp8_rows, attend_rows
from model.backends.triton_encode import encode_index_queries
from model.backends.triton_index import StoredKeys, decode_scores, prompt_scores
from model.backends.triton_top import top_positions
from model.cache import PagedKeys
from model.indexer import IndexQueries

# Bounds the scores of one block of a prompt's queries, so that memory is linear in the length of the context.
SCORE_BLOCK_BYTES = 64 << 20


class TritonBackend:
    """Never waits for the device. See AttentionBackend.

    Of equal scores it selects the first, which may differ from what the torch backend selects.
    """

    name = "triton"

    def __init__(self, kv_format: KVFormat) -> None:
        self.format = kv_format

    def attend_rows(
        self, queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        if isinstance(self.format, Fp8Format):
            return attend_fp8_rows(queries, kv, rows, scaling, self.format)
        return attend_rows(queries, self.format.items(kv), rows, scaling, latent_dim)

    def select_for_prompt(
        self, index: IndexQueries, keys: torch.Tensor, start: int, sequence_length: int, topk: int
    ) -> torch.Tensor:
        """See AttentionBackend; k is min(topk, start + T)."""
        num_queries, num_keys = len(index.queries), len(keys)
        index, stored = self._multiplied(index, keys)
        block = max(1, SCORE_BLOCK_BYTES // (4 * num_keys))
        selections = []
        for begin in range(0, num_queries, block):
            part = slice(begin, begin + block)
            selections.append(top_positions(prompt_scores(index[part], stored, start + begin), topk))
        return torch.cat(selections)

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        """See AttentionBackend; k is min(topk, positions that the page table has room for), whatever the lengths."""
        index, stored = self._multiplied(index, pages.keys)
        return top_positions(decode_scores(index, pages, stored), topk)

    def _multiplied(self, index: IndexQueries, keys: torch.Tensor) -> tuple[IndexQueries, StoredKeys]:
        """Queries and stored keys, uint8 [..., index_key_bytes], as kernels multiply them."""
        if isinstance(self.format, Fp8Format):
            return encode_index_queries(index), StoredKeys.fp8(keys.contiguous(), self.format.index_dim)
        return index, StoredKeys(self.format.index_keys(keys))
