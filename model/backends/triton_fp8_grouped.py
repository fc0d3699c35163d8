"""Grouped products of many rows with block-fp8 weights: rows are sorted by expert, and each expert has its weight.

Tokens are gathered into rows first, so that the copy engine reads tiles of both factors, and scales of neighbouring
rows lie beside each other. Kernels loop over the rows and tiles that there are: launches depend on shapes alone.

Sums are those of the blocks of 128 channels, in order.
"""

import torch
import triton
import triton.language as tl

from model.backends.device import properties
from model.backends.triton_chain import chained, follow
from model.backends.triton_fp8 import new_quantised, on
from model.backends.triton_fp8_sort import Sorted
from model.backends.triton_fp8_tile import described, store
from model.fp8 import BLOCK, blocks

TILE_ROWS = 128
_TILE_COLUMNS = 256
"""Of the product. A thread holds sums of both halves, and products of one half beside them."""

_STAGES = 4
_INTERPRETED_PROGRAMS = 4
_GATHERING_PROGRAMS = 1056
"""8 for each multiprocessor of an H200."""

_BLOCK = tl.constexpr(BLOCK)


def gather_rows(
    x: torch.Tensor, x_scales: torch.Tensor, order: Sorted, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of `order`'s rows: values [rows, K] and scales [rows, K / 128 rounded up] of strides (1, rows).

    x: fp8 [T, K] in contiguous rows. x_scales: float32, of any strides. top_k: pairs of each token.
    """
    room, width = len(order.pairs), x.shape[1]
    values, scales = new_quantised(room, width, x.device)
    if room:
        with on(x.device):
            _gather_rows[(min(room, _GATHERING_PROGRAMS),)](
                x.view(torch.uint8),
                x.stride(0),
                x_scales,
                *x_scales.stride(),
                order.pairs,
                order.counts,
                values.view(torch.uint8),
                scales,
                room,
                width,
                blocks(width),
                top_k,
                block=triton.next_power_of_2(width),
                block_scales=triton.next_power_of_2(blocks(width)),
                num_warps=8,
                **chained(x.device),
            )
    return values, scales


def grouped_product(
    x: torch.Tensor, x_scales: torch.Tensor, order: Sorted, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Every row times the transpose of its expert's weight: bfloat16 [rows, N].

    x, x_scales: as `gather_rows` returns them. order: sorted into tiles of TILE_ROWS. weight: fp8 [experts, N, K], its
    scales [experts, N / 128 rounded up, K / 128 rounded up], contiguous.
    """
    n, k = weight.shape[1:]
    out = torch.empty(len(x), n, dtype=torch.bfloat16, device=x.device)
    if not len(x):
        return out
    pieces = len(order.tiles) * triton.cdiv(n, _TILE_COLUMNS)
    programs = properties(x.device).multi_processor_count if x.is_cuda else _INTERPRETED_PROGRAMS
    with on(x.device):
        _grouped_product[(min(programs, pieces),)](
            described(x, TILE_ROWS),
            x_scales,
            described(weight, BLOCK),
            scales,
            order.table,
            out,
            len(x),
            n,
            blocks(n),
            blocks(k),
            compiled=x.is_cuda,
            tile_rows=TILE_ROWS,
            tile_columns=_TILE_COLUMNS,
            stages=_STAGES,
            num_warps=8,
            **chained(x.device),
        )
    return out


@triton.jit(do_not_specialize=["room"])  # type: ignore[untyped-decorator]
def _gather_rows(
    x: tl.tensor,
    x_row_stride: tl.tensor,
    x_scales: tl.tensor,
    x_scale_row_stride: tl.tensor,
    x_scale_block_stride: tl.tensor,
    pairs: tl.tensor,
    counts: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    room: tl.tensor,
    width: tl.tensor,
    num_blocks: tl.tensor,
    top_k: tl.constexpr,
    block: tl.constexpr,
    block_scales: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Every num_programs-th row. room: rows that there may be, the stride of scales."""
    follow(chained)
    column = tl.arange(0, block)
    group = tl.arange(0, block_scales)
    for row in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        token = (tl.load(pairs + row) // top_k).to(tl.int64)
        value = tl.load(x + token * x_row_stride + column, mask=column < width, other=0)
        here = x_scales + token * x_scale_row_stride + group * x_scale_block_stride
        scale = tl.load(here, mask=group < num_blocks, other=0.0)
        tl.store(values + row * width.to(tl.int64) + column, value, mask=column < width)
        tl.store(scales + group.to(tl.int64) * room + row, scale, mask=group < num_blocks)


@triton.jit(do_not_specialize=["room"])  # type: ignore[untyped-decorator]
def _grouped_product(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    room: tl.tensor,
    n: tl.tensor,
    row_blocks: tl.tensor,
    num_blocks: tl.tensor,
    compiled: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    stages: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Some of the pieces, each a tile's rows by tile_columns rows of a weight. room: rows that there may be."""
    follow(chained)
    across = tl.cdiv(n, tile_columns)
    pieces = tl.load(table + 1) * across
    # As many programs as have equally many pieces: the others' share of bandwidth is theirs.
    programs = tl.cdiv(pieces, tl.maximum(tl.cdiv(pieces, tl.num_programs(0)), 1))
    for piece in range(tl.program_id(0), pieces if tl.program_id(0) < programs else 0, programs):
        column = piece % across * tile_columns
        tile = table + 4 * (1 + piece // across)
        expert = tl.load(tile)
        first_row = tl.load(tile + 1)
        row = first_row + tl.arange(0, tile_rows)
        real = row < tl.load(tile + 2)
        scale_row = expert * row_blocks + column // _BLOCK
        next_row = tl.minimum(scale_row + 1, (expert + 1) * row_blocks - 1)
        first, second = _multiply(
            x,
            first_row,
            x_scales + row,
            real,
            room,
            weight,
            expert * n + column,
            scales + scale_row.to(tl.int64) * num_blocks,
            scales + next_row.to(tl.int64) * num_blocks,
            num_blocks,
            compiled,
            tile_rows,
            stages,
        )
        store(out, first, row, real, column, n, _BLOCK)
        store(out, second, row, real, column + _BLOCK, n, _BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(
    x: tl.tensor,
    x_row: tl.tensor,
    x_scales: tl.tensor,
    real: tl.tensor,
    room: tl.tensor,
    weight: tl.tensor,
    weight_row: tl.tensor,
    first_scale: tl.tensor,
    second_scale: tl.tensor,
    num_blocks: tl.tensor,
    compiled: tl.constexpr,
    tile_rows: tl.constexpr,
    stages: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """float32 [tile_rows, 128] twice: rows of x by 128 rows of the weight, and by the 128 that follow.

    x, weight: descriptors. x_scales: points to each row's scale of the first block; those of the next block lie `room`
    behind. first_scale, second_scale: point to the scales of both parts of the weight, block by block.
    """
    first = tl.zeros([tile_rows, _BLOCK], tl.float32)
    second = tl.zeros([tile_rows, _BLOCK], tl.float32)
    for block in tl.range(0, num_blocks, num_stages=stages):
        rows = x.load([x_row, block * _BLOCK])
        scale = tl.load(x_scales + block * room, mask=real, other=0.0)
        values = weight.load([weight_row, block * _BLOCK])
        first += tl.dot(rows, values.T) * (scale * tl.load(first_scale + block))[:, None]
        if compiled:
            # The compiler would start the next product before it has added this one up, and run out of registers.
            first = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [first], dtype=tl.float32, is_pure=False, pack=1
            )
        values = weight.load([weight_row + _BLOCK, block * _BLOCK])
        second += tl.dot(rows, values.T) * (scale * tl.load(second_scale + block))[:, None]
    return first, second
