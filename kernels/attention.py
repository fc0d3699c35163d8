"""Attention backends: the one in plain torch, and where that of Triton comes from.

The torch backend runs anywhere, and in float32 selects what transformers selects.

Equal scores do occur (ReLU gives exact zeros), and torch.topk breaks ties in an order that depends on the length of
the row. To select the same positions as the reference, a row has the length that it has there: the whole prompt for a
query of the prompt, the sequence so far for a decoded token.
"""

import torch

from kernels.kv_format import KVFormat
from kernels.operands import IndexQueries, LayerNorm, PagedKeys, RmsNorm, Rope
from kernels.ops import ops_for


def triton_backend(kv_format: KVFormat) -> "AttentionBackend":
    """Attention by Triton. Raises ImportError where what compiles csrc/ is missing."""
    from kernels.triton.attention import backend_for

    return backend_for(kv_format)


CPU_BLOCK_BYTES = 8 << 20
"""Of gathered items or per-head scores that are computed at once on a CPU: they stay in its cache, and the allocator
keeps their memory, where the operating system would clear that of larger ones for each block."""
GPU_BLOCK_BYTES = 64 << 20
"""The same on a GPU, so that memory is linear in the length of the context."""


class AttentionBackend:
    """The part of sparse attention that depends on how KV is stored. Stateless and deterministic.

    This is the one in plain torch: it gathers rows and multiplies them, and scores each sequence on its own.
    """

    name = "torch"

    def __init__(self, kv_format: KVFormat) -> None:
        self.format = kv_format

    def encode_items(self, compressed: torch.Tensor, norm: RmsNorm, rope: Rope) -> torch.Tensor:
        """Items as pools store them, uint8 [N, item_bytes].

        compressed: [N, latent_dim + rope_dim], what `kv_a_proj_with_mqa` computes. norm: of the latent.
        """
        latent, key_rope = compressed.unsqueeze(1).tensor_split((norm.weight.numel(),), dim=-1)
        items = ops_for(compressed).rotate(key_rope, norm(latent), rope, interleaved=True, beside_first=True)
        return self.format.encode_items(items.squeeze(1))

    def encode_index_keys(
        self, projected: torch.Tensor, norm: LayerNorm, rope: Rope, interleaved: bool
    ) -> torch.Tensor:
        """Index keys as pools store them, uint8 [N, index_key_bytes].

        projected: [N, index_dim], what `wk` computes. interleaved: see `Ops.rotate`.
        """
        rotated, rest = norm(projected).unsqueeze(1).tensor_split((rope.dim,), dim=-1)
        keys = ops_for(projected).rotate(rotated, rest, rope, interleaved=interleaved, beside_first=False)
        return self.format.encode_index_keys(keys.squeeze(1))

    def attend_rows(
        self, queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
    ) -> torch.Tensor:
        """Attend each query to its own rows of a pool.

        queries: [N, heads, item_dim]. kv: uint8 [num_rows, item_bytes]. rows: int64 [N, k], -1 where there is none. The
        first row of a query exists, unless it has no rows at all; then its result is finite and meaningless. Returns
        the attended latents, [N, heads, latent_dim], in the dtype of the queries.
        """
        block = _queries_at_once(rows.shape[1] * queries.shape[2] * queries.element_size(), queries.device)
        attended = [
            self._attend_block(queries[begin : begin + block], kv, rows[begin : begin + block], scaling, latent_dim)
            for begin in range(0, len(rows), block)
        ]
        return torch.cat(attended) if attended else queries[..., :latent_dim]

    def attend_prompt(
        self,
        queries: torch.Tensor,
        kv: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        scaling: float,
        latent_dim: int,
    ) -> torch.Tensor:
        """`attend_rows` of a prompt's queries to its positions, int64 [N, k], -1 for none.

        rows: int64 [num_positions + 1], the row of each position, and -1 last.
        """
        return self.attend_rows(queries, kv, rows[positions], scaling, latent_dim)

    def select_for_prompt(
        self, index: IndexQueries, keys: torch.Tensor, start: int, sequence_length: int, topk: int
    ) -> torch.Tensor:
        """Select for the T queries at positions [start, start + T) of a prompt.

        keys: uint8 [start + T, index_key_bytes], of all positions so far. Returns int64 positions [T, k] in any order,
        where k is at least min(topk, start + T) and at most topk; -1 where a query has fewer positions before it.

        In plain torch k is min(topk, sequence_length).
        """
        index, num_keys = self._stored_as_keys(index), len(keys)
        # A product of columns that lie one after the other takes a CPU two thirds of the time.
        keys = self.format.index_keys(keys).float().t().contiguous().t()
        block = _queries_at_once(4 * index.queries.shape[1] * num_keys, keys.device)
        key_positions = torch.arange(num_keys, device=keys.device)
        selections = []
        for begin in range(0, len(index.queries), block):
            end = min(begin + block, len(index.queries))
            query_positions = torch.arange(start + begin, start + end, device=keys.device).unsqueeze(1)
            scores = keys.new_full((end - begin, sequence_length), float("-inf"))
            scores[:, :num_keys] = _scores(index[begin:end], keys)
            scores[:, :num_keys].masked_fill_(key_positions > query_positions, float("-inf"))
            selected = scores.topk(min(topk, sequence_length), dim=-1).indices
            selections.append(selected.masked_fill_(selected > query_positions, -1))
        return torch.cat(selections)

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        """Select for one query of each request of a batch, over the request's whole sequence.

        Returns int64 positions [batch, k] in any order, where k is at least min(topk, longest sequence) and 1, and at
        most topk; -1 where a sequence is shorter. Where `pages.lengths` is None nothing waits for the device.

        In plain torch each row is scored over exactly its own length, where the host knows it, and k is min(topk,
        longest sequence), or 1 where all are padding. Else scores are over all that the page table has room for, and k
        is the least of topk and that.
        """
        index = self._stored_as_keys(index)
        if pages.lengths is None:
            return self._select_masked(index, pages, topk)
        lengths = pages.lengths
        page_size = pages.keys.shape[1]
        selections = pages.page_table.new_full((len(lengths), min(topk, max(1, *lengths))), -1)
        for row, length in enumerate(lengths):
            page_ids = pages.page_table[row, : -(-length // page_size)]
            keys = self.format.index_keys(pages.keys[page_ids].flatten(0, 1)[:length]).float()
            scores = _scores(index[row : row + 1], keys)
            selected = scores.topk(min(topk, length), dim=-1).indices
            selections[row, : selected.shape[1]] = selected[0]
        return selections

    def _attend_block(
        self, queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
    ) -> torch.Tensor:
        absent = rows < 0
        # An absent row gets no weight, but zero times whatever an unused row holds may be NaN: read a row that exists.
        items = self.format.items_at(kv, torch.where(absent, rows[:, :1], rows)).to(queries.dtype)
        scores = torch.bmm(queries, items.transpose(1, 2)).float() * scaling
        # The least number rather than -inf: a query without any row must not become NaN.
        scores = scores.masked_fill(absent.unsqueeze(1), torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1).to(queries.dtype)
        return torch.bmm(weights, items[..., :latent_dim])

    def _stored_as_keys(self, index: IndexQueries) -> IndexQueries:
        """Queries in the coordinates of the stored keys."""
        return IndexQueries.of(self.format.index_queries(index.queries), index.head_weights)

    def _select_masked(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        """Select without knowing any length: what lies past a sequence scores -inf."""
        batch, width = len(pages.page_table), pages.page_table.shape[1] * pages.keys.shape[1]
        block = _queries_at_once(4 * index.queries.shape[1] * width, pages.keys.device)
        lengths = pages.seq_lens.unsqueeze(1)
        behind = torch.arange(width, device=lengths.device) >= lengths
        selections = []
        for begin in range(0, batch, block):
            part = slice(begin, begin + block)
            keys = self.format.index_keys(pages.keys[pages.page_table[part]].flatten(1, 2)).float()
            scores = _scores(index[part], keys).masked_fill_(behind[part], float("-inf"))
            selected = scores.topk(min(topk, width), dim=-1).indices
            selections.append(selected.masked_fill_(selected >= lengths[part], -1))
        return torch.cat(selections)


def _queries_at_once(bytes_each: int, device: torch.device) -> int:
    """How many queries make a block, of each of which so many bytes are computed."""
    room = CPU_BLOCK_BYTES if device.type == "cpu" else GPU_BLOCK_BYTES
    return max(1, room // max(1, bytes_each))


def _scores(index: IndexQueries, keys: torch.Tensor) -> torch.Tensor:
    """sum over heads of weight * relu(q . k / sqrt(dim)), float32 [num_queries, num_keys].

    keys: float32 [num_keys, dim], or [num_queries, num_keys, dim] where each query has its own.
    """
    per_head = (index.queries.float() @ keys.transpose(-1, -2)).mul_(keys.shape[-1] ** -0.5).relu_()
    return torch.bmm(index.head_weights.unsqueeze(1), per_head).squeeze(1)
