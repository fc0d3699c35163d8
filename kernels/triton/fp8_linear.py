"""Linear layers with block-fp8 weights on Hopper: a Triton kernel for few tokens, torch's blockwise product for many.

Those of whole chunks of prompts are computed by DeepGEMM, where it is installed (`kernels.deep_gemm`).

The Triton kernel streams the weight once. Split-K: where the weight has few rows, several programs share a tile's
channels, and a second kernel adds up what they computed, in order (`kernels.triton.fp8_tile`). How a product is cut
depends on the weight's shape alone, so a token's result is the same among 1 and among `FEW` tokens. torch's kernel sums
in another order.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.functional import ScalingType
from triton.language import constexpr, tensor

from kernels.deep_gemm import deep_gemm
from kernels.fp8 import BLOCK, FP8, blocks, check_scales
from kernels.operands import SwiGluWeights
from kernels.triton.fp8_quantise import swiglu_quantise
from kernels.triton.fp8_tile import Tiling, described, multiply
from kernels.triton.launch import follow, launch

FEW = 64
"""The most tokens that the Triton kernel serves, where torch's can serve more."""

_PROGRAMS = 528
"""Programs that keep the memory of an H200 busy: 4 for each of its 132 multiprocessors. No device's own number, since
the order of sums follows from it."""

_LEAST_RUN = 8
"""Blocks of 128 channels that a program computes at least."""

_FOUR = 4
_BLOCK = tl.constexpr(BLOCK)


def linear_fp8(x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """See `kernels.ops.Ops`. K has to be a multiple of 16. Raises ValueError for tensors that do not fit together."""
    if len(x) > FEW and _torch_computes(weight):
        library = deep_gemm(len(x), x.device)
        multiply_many = torch_product if library is None else library.product
        return multiply_many(x, x_scales, weight, scales)
    return partial_product(x, x_scales, weight, scales)


def mlp_fp8(x: torch.Tensor, x_scales: torch.Tensor, weights: SwiGluWeights) -> torch.Tensor:
    """See `kernels.ops.Ops`. Each projection is rounded to bfloat16."""
    if weights.down.shape[1] % BLOCK:
        raise ValueError(f"expected a width that is a multiple of {BLOCK}, found {weights.down.shape[1]}")
    both = linear_fp8(x, x_scales, weights.gate_up, weights.gate_up_scales)
    inner = swiglu_quantise(both, weights.power_of_two)
    return reduce_fp8(linear_fp8(*inner, weights.down, weights.down_scales))


@functools.cache
def _blockwise(device: torch.device) -> bool:
    """Whether torch has the blockwise product: on Hopper, with a cuBLAS of CUDA 12.9 or newer."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def _torch_computes(weight: torch.Tensor) -> bool:
    return len(weight) % 16 == 0 and weight.shape[1] % BLOCK == 0 and _blockwise(weight.device)


def torch_product(x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product by torch, whose kernel reads scales in fours: of tokens, and of a weight's row of blocks."""
    check_scales(weight, scales)
    tokens = len(x)
    if tokens % _FOUR:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, -tokens % _FOUR)).view(FP8)
        x_scales = F.pad(x_scales.t(), (0, -tokens % _FOUR)).t()
    product = F.scaled_mm(
        x,
        weight.t(),
        x_scales,
        ScalingType.BlockWise1x128,
        F.pad(scales, (0, -scales.shape[1] % _FOUR)).t() if scales.shape[1] % _FOUR else scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product[:tokens]


def run_of(n: int, k: int, block_n: int) -> int:
    """How many blocks of channels one program computes of a weight [n, k]."""
    splits = max(1, min(_PROGRAMS // -(-n // block_n), blocks(k) // _LEAST_RUN))
    return -(-blocks(k) // splits)


def _tiling(m: int) -> Tiling:
    """For m tokens; more rows per tile of the weight, if there are many tokens, since each tile reads them."""
    if m <= 16:
        return Tiling(m=16, n=64, warps=4, stages=5, per_sm=4)
    if m <= 32:
        return Tiling(m=32, n=64, warps=4, stages=4, per_sm=4)
    if m <= 64:
        return Tiling(m=64, n=64, warps=4, stages=3, per_sm=4, registers=128)
    return Tiling(m=128, n=128, warps=8, stages=4, per_sm=1, tokens_left=True)


_RUN_ROWS = 64
"""Rows of a weight's tile for which `run_of` is computed, whatever the tile: the order of sums is to be one."""


def partial_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, tiling: Tiling | None = None
) -> torch.Tensor:
    """The product: bfloat16 [M, N], or float32 [splits, M, N], which is to be added up.

    x: fp8 [M, K]. x_scales: [M, K / 128] of strides (1, M).
    """
    (m, k), n = x.shape, len(weight)
    check_scales(weight, scales)
    fits = weight.shape[1] == k and scales.is_contiguous()
    fits &= x.dtype == FP8 and x.is_contiguous() and x_scales.stride(0) == 1 and len(x_scales) == m
    if not fits:
        raise ValueError(
            f"expected contiguous x [M, {weight.shape[1]}] in fp8 with scales of strides 1 and M, found {x.dtype} "
            f"{list(x.shape)} of strides {x.stride()} with scales of strides {x_scales.stride()}"
        )
    cut = tiling or _tiling(m)
    run = run_of(n, k, _RUN_ROWS)
    splits = triton.cdiv(blocks(k), run) if m <= FEW else 1
    if splits == 1:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    else:
        out = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    launch(
        _linear, (triton.cdiv(n, cut.n), splits, triton.cdiv(m, cut.m)), x.device,
        described(weight, cut.n), scales, x, x_scales, x_scales.stride(1), out,
        m, n, k, blocks(k), run if splits > 1 else blocks(k),
        ragged=k % BLOCK != 0, tokens_left=cut.tokens_left,
        block_n=cut.n, block_m=cut.m, stages=cut.stages, unroll=cut.unroll,
        num_warps=cut.warps, maxnreg=cut.registers,
    )  # fmt: skip
    return out


def reduce_fp8(parts: torch.Tensor) -> torch.Tensor:
    """The sum over splits, rounded: bfloat16 [M, N]."""
    if parts.dim() == 2:
        return parts
    splits, m, n = parts.shape
    out = torch.empty(m, n, dtype=torch.bfloat16, device=parts.device)
    block = 512
    launch(_add_up, (triton.cdiv(m * n, block),), parts.device, parts, out, m * n, splits, block, num_warps=4)
    return out


@triton.jit(do_not_specialize=["x_scale_block_stride", "m", "num_blocks", "run"])
def _linear(
    weight: tensor, scales: tensor, x: tensor, x_scales: tensor, x_scale_block_stride: tensor, out: tensor,
    m: tensor, n: tensor, k: tensor, num_blocks: tensor, run: tensor,
    ragged: constexpr, tokens_left: constexpr,
    block_n: constexpr, block_m: constexpr, stages: constexpr, unroll: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """One tile over one run of channels."""
    follow(chained)
    first_row = tl.program_id(0) * block_n
    split = tl.program_id(1)
    token = tl.program_id(2) * block_m + tl.arange(0, block_m)
    begin = split * run
    end = tl.minimum(begin + run, num_blocks)
    weight_scale = scales + (first_row // _BLOCK).to(tl.int64) * num_blocks
    total = multiply(
        weight, first_row, weight_scale,
        x, k, x_scales, 1, x_scale_block_stride, token, token < m,
        begin, end, run, k,
        ragged, False, tokens_left, block_n, block_m, stages, unroll,
    )  # fmt: skip
    row = first_row + tl.arange(0, block_n)
    place = (split.to(tl.int64) * m + token)[:, None] * n + row[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(token < m)[:, None] & (row < n)[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_up(
    partial: tensor, out: tensor, size: tensor,
    splits: constexpr, block: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """A block of the sum over the splits of partial [splits, size]."""
    follow(chained)
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = place < size
    total = tl.load(partial + place, mask=real, other=0.0)
    for split in tl.static_range(1, splits):
        total += tl.load(partial + split * size.to(tl.int64) + place, mask=real, other=0.0)
    tl.store(out + place, total.to(tl.bfloat16), mask=real)
