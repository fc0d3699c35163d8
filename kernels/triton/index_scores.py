"""The lightning indexer's scores as Triton kernels: sum over heads of weight * relu(q . k / sqrt(dim)), in float32.

DeepSeek-V3.2, section 2.1. Per-head scores stay on the chip. The scale is positive, so it is applied to the head
weights instead of every score. Products of float32 have "ieee" precision, since tensor cores would round their factors
to 10 bits. It does not affect other dtypes.

fp8 keys are multiplied as they are stored, by queries in fp8 (`encode.encode_index_queries`), and the sum over
heads is then multiplied by the key's scale, which is positive, too. On Hopper, scores of fp8 keys of
published widths are computed by kernels of csrc/ (`kernels/score_keys.py`): one does not wait
for a page before it fetches the next ones, the other keeps keys in registers and sums over heads there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.kv_format import SCALE_BYTES
from kernels.launch import is_hopper
from kernels.operands import IndexQueries, PagedKeys
from kernels.score_keys import PagesToScore, PromptToScore, score_pages, score_prompt
from kernels.triton.launch import MIN_TILE, follow, launch, properties, tile_width

_SCALE_BYTES = tl.constexpr(SCALE_BYTES)

_DEEP_PIPELINE_BYTES = 152_000
"""Shared memory that a program with three tiles of 128 keys in flight needs."""


@dataclass(frozen=True)
class StoredKeys:
    """Index keys as kernels read them.

    vectors: [..., dim], each contiguous, in the type of the queries. scales: float32 [...], what to multiply products
    with them by; None: 1.
    """

    vectors: torch.Tensor
    scales: torch.Tensor | None = None
    stored: torch.Tensor | None = None
    """The bytes of fp8 keys."""

    @classmethod
    def fp8(cls, stored: torch.Tensor, dim: int) -> "StoredKeys":
        """Of uint8 [..., dim + SCALE_BYTES], contiguous: float8_e4m3 vectors, and after each of them its scale."""
        return cls(
            stored.view(torch.float8_e4m3fn)[..., :dim], stored.view(torch.float32)[..., dim // SCALE_BYTES], stored
        )


def decode_scores(
    index: IndexQueries, pages: PagedKeys, keys: StoredKeys, use_cuda_kernel: bool = True, waves: int | None = None
) -> torch.Tensor:
    """Scores of queries against their requests' sequences.

    keys: those of `pages`, [num_pages, page_size, dim]. use_cuda_kernel: take the kernel of csrc/ where it can run.
    waves: programs of the Triton kernel per multiprocessor, chosen if None.

    Returns float32 [batch, page_table width * page_size]; what lies past a row's length is meaningless. Lengths are
    read on the device, so the launch depends on shapes alone and can be captured in a CUDA graph.
    """
    if use_cuda_kernel and keys.stored is not None and is_hopper(keys.stored.device):
        queries, weights = index.queries.contiguous(), index.head_weights.contiguous()
        given = PagesToScore(queries, weights, keys.stored, pages.page_table, pages.seq_lens, pages.rows_each)
        if given.fits():
            return score_pages(given)
    table = pages.page_table
    batch, heads, dim = index.queries.shape
    vectors, page_size = keys.vectors, keys.vectors.shape[1]
    width = table.shape[1] * page_size
    scores = index.head_weights.new_empty(batch, width)
    tiling = _tiling(heads, vectors)
    tiles = triton.cdiv(width, tiling.positions)
    programs = (waves or tiling.waves) * properties(vectors.device).multi_processor_count
    tiles_per_program = triton.cdiv(tiles * batch, programs)
    launch(
        _score_pages, (batch, triton.cdiv(tiles, tiles_per_program)), vectors.device,
        index.queries.contiguous(), index.head_weights.contiguous(),
        vectors, vectors if keys.scales is None else keys.scales, table, pages.seq_lens, scores,
        vectors.stride(0), table.stride(0), width, tiles_per_program, dim**-0.5, heads, dim, page_size,
        key_stride=vectors.stride(1), scaled=keys.scales is not None,
        block_heads=tiling.heads, block_dim=_tile_dim(dim, vectors), block_positions=tiling.positions,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return scores


def prompt_scores(index: IndexQueries, keys: StoredKeys, start: int, use_cuda_kernel: bool = True) -> torch.Tensor:
    """Scores of queries at consecutive positions from `start` on against the keys [num_keys, dim] of positions from 0.

    use_cuda_kernel: take the kernel of csrc/ where it can run.

    Returns float32 [N, num_keys]; what lies past a query's own position is not written.
    """
    if use_cuda_kernel and keys.stored is not None and is_hopper(keys.stored.device):
        queries, weights = index.queries.contiguous(), index.head_weights.contiguous()
        prompt = PromptToScore(queries, weights, keys.stored, start)
        if prompt.fits():
            return score_prompt(prompt)
    num_queries, heads, dim = index.queries.shape
    vectors, num_keys = keys.vectors, len(keys.vectors)
    scores = index.head_weights.new_empty(num_queries, num_keys)
    wide = vectors.dtype.itemsize > 2
    block_queries, block_keys = (32, 32) if wide else (128, 128)
    launch(
        _score_prompt, (triton.cdiv(num_keys, block_keys), triton.cdiv(num_queries, block_queries)), vectors.device,
        index.queries.contiguous(), index.head_weights.contiguous(),
        vectors, vectors if keys.scales is None else keys.scales, scores,
        num_queries, num_keys, start, dim**-0.5, heads, dim,
        key_stride=vectors.stride(0), scaled=keys.scales is not None,
        block_queries=block_queries, block_keys=block_keys, block_dim=_tile_dim(dim, vectors),
        num_warps=8, num_stages=1 if wide else 3,
    )  # fmt: skip
    return scores


@dataclass(frozen=True)
class _Tiling:
    """How `_score_pages` cuts its work: heads and positions per tile, and what Triton is told about each program.

    waves: programs per multiprocessor. stages: page numbers are fetched ahead of the keys, so every second one holds
    keys.
    """

    heads: int
    positions: int
    warps: int
    stages: int
    waves: int


def _tiling(heads: int, vectors: torch.Tensor) -> _Tiling:
    """One program per multiprocessor can fetch ahead in a long row of tiles. Tiles of fp8 are small enough for two,
    of which one multiplies while the other adds up heads."""
    if vectors.dtype.itemsize > 2:
        return _Tiling(MIN_TILE, 32, warps=4, stages=_stages(heads, MIN_TILE, vectors.device), waves=1)
    block_heads = min(tile_width(heads), 64)
    if vectors.dtype.itemsize == 1:
        return _Tiling(block_heads, 128, warps=4, stages=5 if heads <= block_heads else 1, waves=2)
    return _Tiling(block_heads, 128, warps=4, stages=_stages(heads, block_heads, vectors.device), waves=1)


def _tile_dim(dim: int, vectors: torch.Tensor) -> int:
    """The width of a tile of keys; tensor cores take 32 bytes of one at a time."""
    return max(tile_width(dim), 32 // vectors.dtype.itemsize)


def _stages(heads: int, block_heads: int, device: torch.device) -> int:
    if heads > block_heads:
        return 1  # more stages would also hold several tiles of queries
    return 5 if properties(device).shared_memory_per_block_optin >= _DEEP_PIPELINE_BYTES else 3


@triton.jit(do_not_specialize=["tiles_per_program"])
def _score_pages(
    queries: tensor, head_weights: tensor,
    keys: tensor, key_scales: tensor, page_table: tensor, seq_lens: tensor, scores: tensor,
    page_stride: tensor, table_stride: tensor, width: tensor, tiles_per_program: tensor, scale: tensor,
    heads: constexpr, dim: constexpr, page_size: constexpr, key_stride: constexpr, scaled: constexpr,
    block_heads: constexpr, block_dim: constexpr, block_positions: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """One sequence, some consecutive tiles of its positions. page_stride, key_stride: in elements of the keys."""
    follow(chained)
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
        if scaled:  # a scale takes as much room as four elements
            place = page * (page_stride // _SCALE_BYTES) + (position % page_size) * (key_stride // _SCALE_BYTES)
            score *= tl.load(key_scales + place, mask=present, other=0.0)
        tl.store(scores + sequence * width + position, score, mask=present)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "start"])
def _score_prompt(
    queries: tensor, head_weights: tensor,
    keys: tensor, key_scales: tensor, scores: tensor,
    num_queries: tensor, num_keys: tensor, start: tensor, scale: tensor, heads: constexpr, dim: constexpr,
    key_stride: constexpr, scaled: constexpr,
    block_queries: constexpr, block_keys: constexpr, block_dim: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """A tile of queries against a tile of keys, head by head."""
    follow(chained)
    first_query, first_key = tl.program_id(1) * block_queries, tl.program_id(0) * block_keys
    token = first_query + tl.arange(0, block_queries)
    key = first_key + tl.arange(0, block_keys)
    column = tl.arange(0, block_dim)
    real_token, real_key, real_column = token < num_queries, key < num_keys, column < dim
    tile = tl.load(
        keys + key[None, :].to(tl.int64) * key_stride + column[:, None],
        mask=real_key[None, :] & real_column[:, None],
        other=0.0,
    )
    score = tl.zeros([block_queries, block_keys], tl.float32)
    # A tile of positions after all queries takes no products.
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
    if scaled:
        place = key.to(tl.int64) * (key_stride // _SCALE_BYTES)
        score *= tl.load(key_scales + place, mask=real_key, other=0.0)[None, :]
    tl.store(
        scores + token[:, None].to(tl.int64) * num_keys + key[None, :],
        score,
        mask=real_token[:, None] & real_key[None, :] & (key[None, :] <= start + token[:, None]),
    )
