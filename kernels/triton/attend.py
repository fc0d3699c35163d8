"""Attention of each query to its own rows of a pool: online softmax and split-K, as two Triton kernels.

The online softmax is that of FlashAttention (Dao et al., arXiv:2205.14135, algorithm 1). Where there are fewer queries
than fill the device, a query's rows are split over several programs, whose results are weighed by their sums of
exponentials and added (Flash-Decoding: Dao, Haziza, Massa, Sizov, https://pytorch.org/blog/flash-decoding, 2023). All
heads read the same item, whose latent is key and value at once, so that a tile of items serves a tile of heads.

Products of float32 have "ieee" precision, since tensor cores would round their factors to 10 bits. It does not affect
other dtypes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.attend_items import TILE_HEADS, TILE_ITEMS, ItemsToAttend, attend_items
from kernels.kv_format import PUBLISHED, SCALE_BYTES, SCALED_TOGETHER, Fp8Layout
from kernels.launch import is_hopper
from kernels.triton.launch import MIN_TILE, follow, launch, properties, tile_width

_FEW_HEADS = 32
"""So many heads do not fill a tile of 64."""
_LARGE_TILES_BYTES = 224_000
"""Shared memory that a program with 64 heads and 64 rows of 576 elements needs."""

# Below every score and yet finite: an absent row's score is -inf, and -inf less this is still -inf rather than NaN.
_FLOOR = tl.constexpr(-1e30)
_TOGETHER = tl.constexpr(SCALED_TOGETHER)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)


@dataclass(frozen=True)
class _Tiling:
    """How the kernel cuts its work: heads and rows per tile, and what Triton is told about each program.

    waves: programs per multiprocessor that a launch aims at when it splits rows. stages: row numbers are fetched ahead
    of the items that they name, so 2n + 1 stages keep n tiles of items in flight.
    """

    heads: int
    rows: int
    warps: int
    stages: int
    waves: int


@dataclass(frozen=True)
class Splits:
    """How the rows of a query are split over programs. most: of a query. partial: type of the splits' results."""

    most: int = 64
    partial: torch.dtype = torch.float32


def attend_rows(
    queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
) -> torch.Tensor:
    """Attend each query to its own rows of a pool, of vectors in the queries' type: see `AttentionBackend`.

    A query may also have no row at all; it attends to zero. The launch depends on shapes alone and waits for nothing,
    so it can be captured in a CUDA graph. Raises ValueError for tensors that do not fit together.
    """
    num_queries, _, item_dim = queries.shape
    if kv.shape[1:] != (item_dim,) or len(rows) != num_queries or kv.dtype != queries.dtype or kv.stride(1) != 1:
        raise ValueError(
            f"expected kv [num_rows, {item_dim}] of {queries.dtype}, each row contiguous, and rows [{num_queries}, k], "
            f"found kv {tuple(kv.shape)} of {kv.dtype} with strides {kv.stride()} and rows {tuple(rows.shape)}"
        )
    in_bf16 = queries.dtype == torch.bfloat16 and kv.is_contiguous() and rows.dtype == torch.int64
    if in_bf16 and fits_cuda_kernel(queries, latent_dim):
        return _attend(queries, kv, rows, scaling, latent_dim, _CUDA_TILING, _by_cuda)
    return _attend(queries, kv, rows, scaling, latent_dim, _tiling(queries), partial(_by_triton, num_scales=0))


def attend_fp8_rows(
    queries: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    scaling: float,
    layout: Fp8Layout,
    use_cuda_kernel: bool = True,
    splits: Splits = Splits(),
) -> torch.Tensor:
    """`attend_rows` of a pool of fp8 items, uint8 [num_rows, item_bytes], contiguous, by queries in bfloat16.

    use_cuda_kernel: take the kernel of csrc/ where it can run.
    """
    num_queries, _, item_dim = queries.shape
    latent_dim = layout.latent_dim
    fits = item_dim == latent_dim + layout.rope_dim and len(rows) == num_queries and rows.dtype == torch.int64
    if not fits or kv.shape[1:] != (layout.item_bytes,) or not kv.is_contiguous() or queries.dtype != torch.bfloat16:
        raise ValueError(
            f"expected queries [{len(rows)}, heads, {latent_dim + layout.rope_dim}] of bfloat16 and contiguous kv "
            f"[num_rows, {layout.item_bytes}] and rows of int64, found {tuple(queries.shape)} of {queries.dtype}, "
            f"{tuple(kv.shape)} with strides {kv.stride()}, and {rows.dtype}"
        )
    if use_cuda_kernel and fits_cuda_kernel(queries, latent_dim):
        return _attend(queries, kv, rows, scaling, latent_dim, _CUDA_TILING, _by_cuda, splits)
    kernel = partial(_by_triton, num_scales=layout.num_scales)
    return _attend(queries, kv, rows, scaling, latent_dim, _tiling(queries, in_fp8=True), kernel, splits)


def fits_cuda_kernel(queries: torch.Tensor, latent_dim: int) -> bool:
    """Whether csrc/attend_items.cu can run for these queries, [N, heads, item_dim]."""
    _, heads, item_dim = queries.shape
    is_published = (latent_dim, item_dim - latent_dim) == (PUBLISHED.latent_dim, PUBLISHED.rope_dim)
    return is_published and heads > _FEW_HEADS and queries.is_cuda and is_hopper(queries.device)


def _by_triton(given: ItemsToAttend, tiling: _Tiling, num_scales: int) -> None:
    """`_attend_split` of a pool of vectors in the queries' type, or with scales of fp8 items."""
    (num_queries, heads, item_dim), latent_dim, kv = given.queries.shape, given.partial.shape[-1], given.items
    types = (torch.float8_e4m3fn, torch.float32, torch.bfloat16) if num_scales else (kv.dtype,) * 3
    pools = [kv.view(dtype) for dtype in types]
    block_latent = tile_width(latent_dim)
    # With a tile or two there is nothing to fetch ahead.
    stages = tiling.stages if given.rows_per_split > 2 * tiling.rows else min(tiling.stages, 2)
    launch(
        _attend_split, (num_queries * triton.cdiv(heads, tiling.heads), given.partial.shape[2]), kv.device,
        given.queries, *pools, given.rows, given.partial, given.log_sums,
        pools[0].stride(0), given.rows.shape[1], given.rows_per_split, given.scale,
        heads, latent_dim, item_dim, num_scales,
        block_heads=tiling.heads, block_rows=tiling.rows,
        block_latent=max(block_latent, SCALED_TOGETHER) if num_scales else block_latent,
        block_rope=tile_width(item_dim - latent_dim),
        num_warps=tiling.warps, num_stages=stages,
    )  # fmt: skip


def _by_cuda(given: ItemsToAttend, _: _Tiling) -> None:
    attend_items(given)


def _attend(
    queries: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    scaling: float,
    latent_dim: int,
    tiling: _Tiling,
    kernel: Callable[[ItemsToAttend, _Tiling], None],
    splits: Splits = Splits(),
) -> torch.Tensor:
    """Split the rows of each query, attend to each split by the kernel, and put the splits together."""
    num_queries, heads, _ = queries.shape
    output = queries.new_empty(num_queries, heads, latent_dim)
    if num_queries == 0:
        return output
    head_tiles = triton.cdiv(heads, tiling.heads)
    num_splits, rows_per_split = _splits(num_queries * head_tiles, rows.shape[1], tiling, splits.most, queries.device)
    log_sums = queries.new_empty(num_queries, heads, num_splits, dtype=torch.float32)
    means = output.unsqueeze(2)
    if num_splits > 1:
        means = queries.new_empty(num_queries, heads, num_splits, latent_dim, dtype=splits.partial)
    scale = scaling * math.log2(math.e)
    kernel(ItemsToAttend(queries.contiguous(), kv, rows.contiguous(), means, log_sums, rows_per_split, scale), tiling)
    if num_splits > 1:
        combine(means, log_sums, output)
    return output


def combine(
    means: torch.Tensor, log_sums: torch.Tensor, output: torch.Tensor, elements: int = 4096, warps: int = 4
) -> None:
    """Put splits together, to output [N, heads, latent_dim].

    means [N, heads, splits, latent_dim] and log_sums [N, heads, splits]: what `_attend_split` writes.

    elements: of means, per program, a power of two; they are on their way to registers at the same time. Whole
    vectors where there is room for all their splits, and else parts of 128 or more.
    """
    num_queries, heads, num_splits, latent_dim = means.shape
    block_splits, width = triton.next_power_of_2(num_splits), tile_width(latent_dim)
    block_latent = min(width, max(128, elements // block_splits))
    block_rows = max(1, elements // (block_splits * block_latent))
    launch(
        _combine, (triton.cdiv(num_queries * heads, block_rows), triton.cdiv(latent_dim, block_latent)), means.device,
        means, log_sums, output, num_queries * heads, num_splits, latent_dim,
        block_rows=block_rows, block_splits=block_splits, block_latent=block_latent, num_warps=warps,
    )  # fmt: skip


def _tiling(queries: torch.Tensor, in_fp8: bool = False) -> _Tiling:
    """The fastest that was found on an H200, at 1 to 64 queries and at prompt chunks, for what the device can hold.

    in_fp8: items are. Those in flight take half the room, and the tile that is multiplied takes its own.
    """
    heads, device = queries.shape[1], queries.device
    if queries.dtype.itemsize > 2:
        return _Tiling(heads=MIN_TILE, rows=MIN_TILE, warps=4, stages=1, waves=2)
    if heads > _FEW_HEADS and properties(device).shared_memory_per_block_optin >= _LARGE_TILES_BYTES:
        return _Tiling(heads=64, rows=64, warps=8, stages=3, waves=1)
    return _Tiling(heads=MIN_TILE, rows=32, warps=4, stages=3 if in_fp8 else 5, waves=2)


_CUDA_TILING = _Tiling(heads=TILE_HEADS, rows=TILE_ITEMS, warps=12, stages=1, waves=1)
"""What csrc/attend_items.cu is written for."""


def _splits(programs: int, k: int, tiling: _Tiling, most: int, device: torch.device) -> tuple[int, int]:
    """How many programs share a query's rows, and how many rows each of them has. None is left without a tile.

    Not more programs than run at once, where there is a choice: a few that run after all others cost as much as a wave.
    """
    tiles = max(1, triton.cdiv(k, tiling.rows))
    wanted = max(1, tiling.waves * properties(device).multi_processor_count // programs)
    tiles_per_split = triton.cdiv(tiles, min(wanted, tiles, most))
    return triton.cdiv(tiles, tiles_per_split), tiles_per_split * tiling.rows


@triton.jit(do_not_specialize=["k", "rows_per_split"])
def _attend_split(
    queries: tensor, kv: tensor, kv_scales: tensor, kv_ropes: tensor, rows: tensor, partial: tensor, log_sums: tensor,
    kv_stride: tensor, k: tensor, rows_per_split: tensor, scale: tensor,
    heads: constexpr, latent_dim: constexpr, item_dim: constexpr, num_scales: constexpr,
    block_heads: constexpr, block_rows: constexpr, block_latent: constexpr, block_rope: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """One tile of a query's heads over one split of its rows. scale: of scores, in units of log2(e).

    kv: items of the queries' type, kv_stride elements apart. With num_scales above 0 they are fp8 items, and kv,
    kv_scales and kv_ropes are the same bytes as numbers of three types. A tile is then scaled to the queries' type in
    registers.

    Writes partial [N, heads, splits, latent_dim], the mean latent by the split's own weights, and log_sums
    [N, heads, splits], the base-2 logarithm of the sum of those weights.
    """
    follow(chained)
    head_tiles: tl.constexpr = tl.cdiv(heads, block_heads)
    query = (tl.program_id(0) // head_tiles).to(tl.int64)
    split = tl.program_id(1)
    head = (tl.program_id(0) % head_tiles) * block_heads + tl.arange(0, block_heads)
    latent = tl.arange(0, block_latent)
    rope = latent_dim + tl.arange(0, block_rope)
    real_head, real_latent, real_rope = head < heads, latent < latent_dim, rope < item_dim

    query_rows = queries + (query * heads + head[:, None]) * item_dim
    query_latents = tl.load(query_rows + latent[None, :], mask=real_head[:, None] & real_latent[None, :], other=0.0)
    query_ropes = tl.load(query_rows + rope[None, :], mask=real_head[:, None] & real_rope[None, :], other=0.0)

    highest = tl.full([block_heads], _FLOOR, tl.float32)
    total = tl.zeros([block_heads], tl.float32)
    attended = tl.zeros([block_heads, block_latent], tl.float32)
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, k)
    for first in range(begin, end, block_rows):
        column = first + tl.arange(0, block_rows)
        row = tl.load(rows + query * k + column, mask=column < end, other=-1)
        present = row >= 0
        items = kv + row[:, None] * kv_stride
        if num_scales == 0:
            latents = tl.load(items + latent[None, :], mask=present[:, None] & real_latent[None, :], other=0.0)
            ropes = tl.load(items + rope[None, :], mask=present[:, None] & real_rope[None, :], other=0.0)
        else:
            stored = tl.load(items + latent[None, :], mask=present[:, None] & real_latent[None, :], other=0.0)
            group = tl.arange(0, block_latent // _TOGETHER)
            item_scales = (
                kv_scales + row[:, None] * (kv_stride // _SCALE_BYTES) + latent_dim // _SCALE_BYTES + group[None, :]
            )
            scales = tl.load(item_scales, mask=present[:, None] & (group < num_scales)[None, :], other=0.0)
            grouped = stored.to(tl.float32).reshape([block_rows, block_latent // _TOGETHER, _TOGETHER])
            latents = (grouped * scales[:, :, None]).reshape([block_rows, block_latent]).to(queries.dtype.element_ty)
            # Behind the latent's bytes and the scales.
            item_ropes = kv_ropes + row[:, None] * (kv_stride // 2) + (_SCALE_BYTES * num_scales - latent_dim) // 2
            ropes = tl.load(item_ropes + rope[None, :], mask=present[:, None] & real_rope[None, :], other=0.0)
        scores = tl.dot(query_latents, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(query_ropes, tl.trans(ropes), scores, input_precision="ieee")
        scores = tl.where(present[None, :], scores * scale, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, 1)
        attended = tl.dot(weights.to(latents.dtype), latents, attended * decay[:, None], input_precision="ieee")
        highest = new_highest

    # The highest score weighs 1: only a split without rows has less, and then there is nothing to divide.
    attended = attended / tl.maximum(total, 1.0)[:, None]
    place = (query * heads + head) * tl.num_programs(1) + split
    tl.store(log_sums + place, highest + tl.log2(total), mask=real_head)
    tl.store(
        partial + place[:, None] * latent_dim + latent[None, :],
        attended,
        mask=real_head[:, None] & real_latent[None, :],
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _combine(
    partial: tensor, log_sums: tensor, output: tensor, num_rows: tensor, num_splits: tensor,
    latent_dim: constexpr, block_rows: constexpr, block_splits: constexpr, block_latent: constexpr,
    chained: constexpr,
) -> None:  # fmt: skip
    """Add up the splits of some rows, each a head of a query, for one block of their latents."""
    follow(chained)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    latent = tl.program_id(1) * block_latent + tl.arange(0, block_latent)
    split = tl.arange(0, block_splits)
    real_row, real_latent = row < num_rows, latent < latent_dim
    place = row[:, None] * num_splits + split[None, :]
    exists = real_row[:, None] & (split < num_splits)[None, :]
    means = tl.load(
        partial + place[:, :, None] * latent_dim + latent[None, None, :],
        mask=exists[:, :, None] & real_latent[None, None, :],
        other=0.0,
    ).to(tl.float32)
    log_sum = tl.load(log_sums + place, mask=exists, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.maximum(tl.max(log_sum, 1), _FLOOR)[:, None])
    attended = tl.sum(weights[:, :, None] * means, 1) / tl.maximum(tl.sum(weights, 1), 1.0)[:, None]
    tl.store(
        output + row[:, None] * latent_dim + latent[None, :], attended, mask=real_row[:, None] & real_latent[None, :]
    )
