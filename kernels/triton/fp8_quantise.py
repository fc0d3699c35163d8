"""Quantisation of activations as Triton kernels: as they come, and after SwiGLU. `kernels.fp8` has the rules.

Scales are returned as [M, ceil(K/128)] whose tokens are contiguous (strides 1, M): what torch's blockwise products ask
for, and what a product kernel reads in whole cache lines.
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.fp8 import BLOCK, FP8, LEAST_AMAX, MAX, blocks
from kernels.triton.launch import follow, launch

_BLOCK = tl.constexpr(BLOCK)
_MAX = tl.constexpr(MAX)
_LEAST_AMAX = tl.constexpr(LEAST_AMAX)
_GROUPS = 8
"""Blocks of 128 channels per program."""


def new_quantised(m: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for values [m, k] and scales [m, ceil(k/128)] of strides (1, m)."""
    scales = torch.empty(blocks(k), m, dtype=torch.float32, device=device).t()
    return torch.empty(m, k, dtype=FP8, device=device), scales


def quantise(x: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.fp8.quantise_activations` of x [M, K] in contiguous rows."""
    m, k = x.shape
    if x.stride(1) != 1 and k > 1:
        raise ValueError(f"expected contiguous rows, found strides {x.stride()}")
    values, scales = new_quantised(m, k, x.device)
    launch(
        _quantise, (m, triton.cdiv(blocks(k), _GROUPS)), x.device,
        x, values, scales, x.stride(0), m, k, power_of_two, groups=_GROUPS, num_warps=4,
    )  # fmt: skip
    return values, scales


def swiglu_quantise(
    gate_up: torch.Tensor, power_of_two: bool, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised silu(gate) * up, values [M, W] and scales, of contiguous gate_up.

    gate_up: [M, 2 * W] in bfloat16, or float32 [splits, M, 2 * W], of which the sum over the splits is rounded to
    bfloat16 first. rows: how many rows there are, one integer on the device; None: all M.
    """
    splits = len(gate_up) if gate_up.dim() == 3 else 1
    m, width = gate_up.shape[-2], gate_up.shape[-1] // 2
    values, scales = new_quantised(m, width, gate_up.device)
    programs = m if rows is None else min(m, _ROW_PROGRAMS)
    launch(
        _swiglu_quantise, (programs, triton.cdiv(blocks(width), _GROUPS)), gate_up.device,
        gate_up, rows, values, scales, m, width, splits, power_of_two, groups=_GROUPS, num_warps=4,
    )  # fmt: skip
    return values, scales


_ROW_PROGRAMS = 1056
"""Programs that share the rows where their number is not known at launch: 8 for each multiprocessor of an H200."""


@triton.jit
def quantised(x: tensor, power_of_two: constexpr) -> tuple[tensor, tensor]:
    """Values and scales [R] of blocks x, float32 [R, 128]."""
    scale = tl.maximum(tl.max(tl.abs(x), 1), _LEAST_AMAX) * (1 / _MAX)
    if power_of_two:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
        # The reciprocal of a power of two is exact.
        values = x * (1.0 / scale)[:, None]
    else:
        # x / scale, rounded once (Markstein, 1990), without the division's branches.
        reciprocal = tl.math.div_rn(1.0, scale)[:, None]
        near = x * reciprocal
        values = tl.fma(tl.fma(-near, scale[:, None], x), reciprocal, near)
    return values.to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["m"])
def _quantise(
    x: tensor, values: tensor, scales: tensor, x_stride: tensor, m: tensor, k: tensor,
    power_of_two: constexpr, groups: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """Some blocks of one row."""
    follow(chained)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * groups + tl.arange(0, groups)
    column = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    number = tl.load(x + row * x_stride + column, mask=column < k, other=0.0).to(tl.float32)
    value, scale = quantised(number, power_of_two)
    tl.store(values + row * k + column, value, mask=column < k)
    tl.store(scales + block.to(tl.int64) * m + row, scale, mask=block * _BLOCK < k)


@triton.jit(do_not_specialize=["m"])
def _swiglu_quantise(
    gate_up: tensor, rows: tensor, values: tensor, scales: tensor, m: tensor, width: tensor,
    splits: constexpr, power_of_two: constexpr, groups: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """Some blocks of every num_programs-th row."""
    follow(chained)
    block = tl.program_id(1) * groups + tl.arange(0, groups)
    column = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    real = column < width
    row_size = 2 * width.to(tl.int64)
    count = m
    if rows is not None:
        count = tl.load(rows)
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        begin = gate_up + row * row_size + column
        gate = tl.load(begin, mask=real, other=0.0).to(tl.float32)
        up = tl.load(begin + width, mask=real, other=0.0).to(tl.float32)
        for split in tl.static_range(1, splits):
            other = begin + split * (m * row_size)
            gate += tl.load(other, mask=real, other=0.0)
            up += tl.load(other + width, mask=real, other=0.0)
        gate = gate.to(tl.bfloat16).to(tl.float32)
        up = up.to(tl.bfloat16).to(tl.float32)
        inner = gate / (1.0 + tl.exp(-gate)) * up
        value, scale = quantised(inner.to(tl.bfloat16).to(tl.float32), power_of_two)
        tl.store(values + row * width.to(tl.int64) + column, value, mask=real)
        tl.store(scales + block.to(tl.int64) * m + row, scale, mask=block * _BLOCK < width)
