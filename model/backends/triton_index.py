"""The lightning indexer's scores as Triton kernels: sum over heads of weight * relu(q . k / sqrt(dim)), in float32.

DeepSeek-V3.2, section 2.1. Per-head scores stay on the chip. The scale is positive, so it is applied to the head
weights instead of every score. Products of float32 have "ieee" precision, since tensor cores would round their factors
to 10 bits. It does not affect other dtypes.
"""

import torch
import triton
import triton.language as tl

from model.backends.device import MIN_TILE, properties, tile_width
from model.cache import PagedKeys
from model.indexer import IndexQueries

_DEEP_PIPELINE_BYTES = 152_000
"""Shared memory that a program with three tiles of 128 keys in flight needs."""


def decode_scores(index: IndexQueries, pages: PagedKeys, keys: torch.Tensor) -> torch.Tensor:
    """Scores of one query per request against its own sequence.

    keys: `pages.keys` decoded, [num_pages, page_size, dim].

    Returns float32 [batch, page_table width * page_size], -inf past each sequence's length. Lengths are read on the
    device, so the launch depends on shapes alone and can be captured in a CUDA graph.
    """
    table = pages.page_table
    batch, heads, dim = index.queries.shape
    page_size = keys.shape[1]
    width = table.shape[1] * page_size
    scores = index.head_weights.new_empty(batch, width)
    wide = keys.dtype.itemsize > 2
    block_heads, block_positions = (MIN_TILE, 32) if wide else (min(tile_width(heads), 64), 128)
    tiles = triton.cdiv(width, block_positions)
    # One program per multiprocessor: it can fetch ahead in a long row of tiles.
    tiles_per_program = triton.cdiv(tiles * batch, properties(keys.device).multi_processor_count)
    with torch.cuda.device(keys.device):
        _score_pages[(batch, triton.cdiv(tiles, tiles_per_program))](
            index.queries.contiguous(),
            index.head_weights.contiguous(),
            keys,
            table,
            pages.seq_lens,
            scores,
            *keys.stride()[:2],
            table.stride(0),
            width,
            tiles_per_program,
            dim**-0.5,
            heads,
            dim,
            page_size,
            block_heads=block_heads,
            block_dim=tile_width(dim),
            block_positions=block_positions,
            num_warps=4,
            num_stages=_decode_stages(heads, block_heads, keys.device),
        )
    return scores


def prompt_scores(index: IndexQueries, keys: torch.Tensor, start: int) -> torch.Tensor:
    """Scores of queries at consecutive positions from `start` on against the keys [num_keys, dim] of positions from 0.

    Returns float32 [N, num_keys], -inf past each query's own position.
    """
    num_queries, heads, dim = index.queries.shape
    scores = index.head_weights.new_empty(num_queries, len(keys))
    wide = keys.dtype.itemsize > 2
    block_queries, block_keys = (32, 32) if wide else (128, 128)
    with torch.cuda.device(keys.device):
        _score_prompt[(triton.cdiv(len(keys), block_keys), triton.cdiv(num_queries, block_queries))](
            index.queries.contiguous(),
            index.head_weights.contiguous(),
            keys.contiguous(),
            scores,
            num_queries,
            len(keys),
            start,
            dim**-0.5,
            heads,
            dim,
            block_queries=block_queries,
            block_keys=block_keys,
            block_dim=tile_width(dim),
            num_warps=8,
            num_stages=1 if wide else 3,
        )
    return scores


def _decode_stages(heads: int, block_heads: int, device: torch.device) -> int:
    """Page numbers are fetched ahead of the keys, so every second stage holds keys."""
    if heads > block_heads:
        return 1  # more stages would also hold several tiles of queries
    return 5 if properties(device).shared_memory_per_block_optin >= _DEEP_PIPELINE_BYTES else 3


@triton.jit(do_not_specialize=["tiles_per_program"])  # type: ignore[untyped-decorator]
def _score_pages(
    queries: tl.tensor,
    head_weights: tl.tensor,
    keys: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    scores: tl.tensor,
    page_stride: tl.tensor,
    key_stride: tl.tensor,
    table_stride: tl.tensor,
    width: tl.tensor,
    tiles_per_program: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
    block_positions: tl.constexpr,
) -> None:
    """One sequence, some consecutive tiles of its positions."""
    sequence = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * tiles_per_program * block_positions
    end = tl.minimum(begin + tiles_per_program * block_positions, width)
    length = tl.minimum(tl.load(seq_lens + sequence), width).to(tl.int32)
    column = tl.arange(0, block_dim)
    real_column = column < dim

    for first in range(begin, tl.minimum(end, length), block_positions):
        position = first + tl.arange(0, block_positions)
        present = position < length
        page = tl.load(page_table + sequence * table_stride + position // page_size, mask=present, other=0)
        key = keys + page * page_stride + (position % page_size) * key_stride
        tile = tl.load(key[:, None] + column[None, :], mask=present[:, None] & real_column[None, :], other=0.0)
        score = tl.zeros([block_positions], tl.float32)
        for first_head in tl.static_range(0, heads, block_heads):
            head = first_head + tl.arange(0, block_heads)
            real_head = head < heads
            place = sequence * heads + head
            query = tl.load(
                queries + place[None, :] * dim + column[:, None],
                mask=real_head[None, :] & real_column[:, None],
                other=0.0,
            )
            weight = tl.load(head_weights + place, mask=real_head, other=0.0) * scale
            per_head = tl.dot(tile, query, input_precision="ieee")
            score += tl.sum(tl.maximum(per_head, 0.0) * weight[None, :], 1)
        score = tl.where(present, score, float("-inf"))
        tl.store(scores + sequence * width + position, score, mask=position < end)

    scored = tl.cdiv(tl.maximum(tl.minimum(end, length) - begin, 0), block_positions) * block_positions
    for first in range(begin + scored, end, block_positions):
        position = first + tl.arange(0, block_positions)
        nothing = tl.full([block_positions], float("-inf"), tl.float32)
        tl.store(scores + sequence * width + position, nothing, mask=position < end)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "start"])  # type: ignore[untyped-decorator]
def _score_prompt(
    queries: tl.tensor,
    head_weights: tl.tensor,
    keys: tl.tensor,
    scores: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    start: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    """A tile of queries against a tile of keys, head by head."""
    first_query, first_key = tl.program_id(1) * block_queries, tl.program_id(0) * block_keys
    token = first_query + tl.arange(0, block_queries)
    key = first_key + tl.arange(0, block_keys)
    column = tl.arange(0, block_dim)
    real_token, real_key, real_column = token < num_queries, key < num_keys, column < dim
    tile = tl.load(
        keys + key[None, :].to(tl.int64) * dim + column[:, None],
        mask=real_key[None, :] & real_column[:, None],
        other=0.0,
    )
    score = tl.zeros([block_queries, block_keys], tl.float32)
    # A tile of positions behind all queries takes no products.
    for head in range(tl.where(first_key < start + first_query + block_queries, heads, 0)):
        place = token.to(tl.int64) * heads + head
        query = tl.load(
            queries + place[:, None] * dim + column[None, :],
            mask=real_token[:, None] & real_column[None, :],
            other=0.0,
        )
        weight = tl.load(head_weights + place, mask=real_token, other=0.0) * scale
        per_head = tl.dot(query, tile, input_precision="ieee")
        score += tl.maximum(per_head, 0.0) * weight[:, None]
    score = tl.where(key[None, :] <= start + token[:, None], score, float("-inf"))
    tl.store(
        scores + token[:, None].to(tl.int64) * num_keys + key[None, :],
        score,
        mask=real_token[:, None] & real_key[None, :],
    )
