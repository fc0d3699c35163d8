"""Sparse attention by Triton kernels, and top-k by a kernel of csrc/.

Imported only where it was chosen: other machines need have neither Triton nor what compiles csrc/.
"""

import torch

from kernels.top_k import top_positions
from kvcache.format import KVFormat
from kvcache.fp8_format import Fp8Format
from model.attention import items_of
from model.backends.triton_attend import attend_fp8_rows, attend_rows
from model.backends.triton_encode import encode_index_keys, encode_index_queries, encode_items
from model.backends.triton_index import StoredKeys, decode_scores, prompt_scores
from model.cache import PagedKeys
from model.indexer import IndexQueries, index_keys_of
from model.norm import LayerNorm, RmsNorm
from model.rope import Rope

# Bounds the scores of one block of a prompt's queries, so that memory is linear in the length of the context.
SCORE_BLOCK_BYTES = 64 << 20


class TritonBackend:
    """Never waits for the device. See AttentionBackend.

    Of equal scores it selects the first, which may differ from what the torch backend selects.
    """

    name = "triton"

    def __init__(self, kv_format: KVFormat) -> None:
        self.format = kv_format

    def encode_items(self, compressed: torch.Tensor, norm: RmsNorm, rope: Rope) -> torch.Tensor:
        """See AttentionBackend."""
        if isinstance(self.format, Fp8Format):
            return encode_items(compressed, norm, rope.cos, rope.sin, self.format)
        return self.format.encode_items(items_of(compressed, norm, rope))

    def encode_index_keys(
        self, projected: torch.Tensor, norm: LayerNorm, rope: Rope, interleaved: bool
    ) -> torch.Tensor:
        """See AttentionBackend."""
        if isinstance(self.format, Fp8Format):
            return encode_index_keys(projected, norm, rope.cos, rope.sin, interleaved, self.format)
        return self.format.encode_index_keys(index_keys_of(projected, norm, rope, interleaved))

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
        lengths = torch.arange(start + 1, start + 1 + num_queries, device=keys.device)
        selections = []
        for begin in range(0, num_queries, block):
            part = slice(begin, begin + block)
            selections.append(top_positions(prompt_scores(index[part], stored, start + begin), topk, lengths[part]))
        return torch.cat(selections)

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        """See AttentionBackend; k is min(topk, positions that the page table has room for), whatever the lengths."""
        index, stored = self._multiplied(index, pages.keys)
        return top_positions(decode_scores(index, pages, stored), topk, pages.seq_lens)

    def _multiplied(self, index: IndexQueries, keys: torch.Tensor) -> tuple[IndexQueries, StoredKeys]:
        """Queries and stored keys, uint8 [..., index_key_bytes], as kernels multiply them."""
        if isinstance(self.format, Fp8Format):
            return encode_index_queries(index), StoredKeys.fp8(keys.contiguous(), self.format.index_dim)
        return IndexQueries.of(index.queries, index.head_weights), StoredKeys(self.format.index_keys(keys))
