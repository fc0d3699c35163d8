"""One tile of a product with a block-fp8 weight, which the kernels of linear layers and of experts share.

Of few tokens the weight is the left factor: tensor cores of Hopper take at least 64 rows on the left, but as few as 8
columns on the right, so little is wasted. Of many, tokens are the left factor: a thread holds results of two of them,
and so needs two scales per step.

**Order of sums.** Within 128 channels the tensor core's; over these blocks, first those of each *run* of `run` blocks,
and then the runs, in order. A run may be a program of its own, whose sum is stored in float32 (`splits`), and what adds
these up in order computes the same bits. So a product depends neither on how many tokens are in the batch nor on how
it is divided.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.fp8 import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_BLOCK_BYTES = 16
"""What the copy engine asks a row of a tensor to be a multiple of."""


@dataclass(frozen=True)
class Tiling:
    """How a product is cut. m, n: tokens and rows of the weight per tile. per_sm: programs per multiprocessor.

    n is 64 or 128, or with tokens_left also 256, which is computed as two of 128. registers: the most of a thread, so
    that per_sm programs fit; None: as many as the compiler takes. unroll: blocks of channels per turn of the loop; the
    copies of two that lie side by side are started together.
    """

    m: int
    n: int
    warps: int
    stages: int
    per_sm: int
    unroll: int = 1
    tokens_left: bool = False
    registers: int | None = None


def described(weight: torch.Tensor, block_n: int) -> TensorDescriptor:
    """A weight [..., N, K] as the copy engine reads it, by tiles of block_n rows, or 128, and 128 channels.

    Raises ValueError if the engine cannot.
    """
    k = weight.shape[-1]
    if not weight.is_contiguous() or k % _BLOCK_BYTES or weight.data_ptr() % _BLOCK_BYTES:
        raise ValueError(
            f"expected a contiguous weight with a multiple of {_BLOCK_BYTES} channels, found shape "
            f"{list(weight.shape)}, strides {weight.stride()}"
        )
    return TensorDescriptor(weight, [weight.numel() // k, k], [k, 1], [min(block_n, BLOCK), BLOCK])


@triton.jit
def multiply(
    weight: tensor, weight_row: tensor, weight_scale: tensor,
    x: tensor, x_row_stride: tensor, x_scale: tensor, x_scale_row_stride: tensor, x_scale_block_stride: tensor,
    x_row: tensor, real: tensor, begin: tensor, end: tensor, run: tensor, k: tensor,
    ragged: constexpr, folds: constexpr, tokens_left: constexpr,
    block_n: constexpr, block_m: constexpr, stages: constexpr, unroll: constexpr,
) -> tensor:  # fmt: skip
    """float32 [block_m, block_n]: rows x_row of x by rows of the weight from weight_row on, over blocks begin to end.

    weight: the descriptor. weight_scale: points to the scale of the tile's first block. x_scale_row_stride,
    x_scale_block_stride: from the scale of a row of x to that of the next row, and of the row's next block. real: which
    rows of x exist; others give zeros. ragged: k is no multiple of 128. folds: several runs are added up.
    """
    column = tl.arange(0, _BLOCK)
    rows = x + x_row.to(tl.int64)[:, None] * x_row_stride + column[None, :]
    x_scales = x_scale + x_row * x_scale_row_stride
    total = tl.zeros([block_m, block_n] if tokens_left else [block_n, block_m], tl.float32)
    part = total
    for block in tl.range(begin, end, num_stages=stages, loop_unroll_factor=unroll):
        values = weight.load([weight_row, block * _BLOCK])
        inside = real[:, None] & (column + block * _BLOCK < k)[None, :] if ragged else real[:, None]
        tokens = tl.load(rows + block * _BLOCK, mask=inside, other=0.0)
        scale = tl.load(x_scales + block * x_scale_block_stride, mask=real, other=0.0)
        scale *= tl.load(weight_scale + block)
        if tokens_left:
            part += tl.dot(tokens, values.T) * scale[:, None]
        else:
            part += tl.dot(values, tokens.T) * scale[None, :]
        if folds:
            over = (block + 1) % run == 0
            total = tl.where(over, total + part, total)
            part = tl.where(over, 0.0, part)
    if folds:
        part = total + part
    return part if tokens_left else part.T


@triton.jit
def multiply_wide(
    weight: tensor, weight_row: tensor, weight_scale: tensor, next_scale: tensor,
    x: tensor, x_row_stride: tensor, x_scale: tensor, x_scale_row_stride: tensor, x_scale_block_stride: tensor,
    x_row: tensor, real: tensor, num_blocks: tensor, k: tensor,
    compiled: constexpr, ragged: constexpr, block_m: constexpr, stages: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """`multiply` over all blocks by 128 rows of the weight and by the 128 that follow, whose scales are at next_scale.

    Each token that is read serves twice as many rows, and only one half's products are held beside both sums. compiled:
    not interpreted.
    """
    column = tl.arange(0, _BLOCK)
    rows = x + x_row.to(tl.int64)[:, None] * x_row_stride + column[None, :]
    x_scales = x_scale + x_row * x_scale_row_stride
    first = tl.zeros([block_m, _BLOCK], tl.float32)
    second = tl.zeros([block_m, _BLOCK], tl.float32)
    for block in tl.range(0, num_blocks, num_stages=stages):
        inside = real[:, None] & (column + block * _BLOCK < k)[None, :] if ragged else real[:, None]
        tokens = tl.load(rows + block * _BLOCK, mask=inside, other=0.0)
        scale = tl.load(x_scales + block * x_scale_block_stride, mask=real, other=0.0)
        values = weight.load([weight_row, block * _BLOCK])
        first += tl.dot(tokens, values.T) * (scale * tl.load(weight_scale + block))[:, None]
        if compiled:
            # The compiler would start the next product before it has added this one up, and run out of registers.
            first = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [first], dtype=tl.float32, is_pure=False, pack=1
            )
        values = weight.load([weight_row + _BLOCK, block * _BLOCK])
        second += tl.dot(tokens, values.T) * (scale * tl.load(next_scale + block))[:, None]
    return first, second
