"""Linear layers with block-fp8 weights on Hopper: a Triton kernel for few tokens, torch's blockwise product for many.

The Triton kernel streams the weight once. Where the weight has few rows, several programs share a tile's channels, and
a second kernel adds up what they computed, in order (`triton_fp8_tile`). How a product is cut depends on the weight's
shape alone, so a token's result is the same among 1 and among `FEW` tokens. torch's kernel sums in another order.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.functional import ScalingType

from model.backends.triton_chain import chained, follow
from model.backends.triton_fp8 import on, quantise, swiglu_quantise
from model.backends.triton_fp8_tile import Tiling, described, multiply
from model.fp8 import BLOCK, FP8, blocks, check_scales

FEW = 64
"""The most tokens that the Triton kernel serves, where torch's can serve more."""

_PROGRAMS = 528
"""Programs that keep the memory of an H200 busy: 4 for each of its 132 multiprocessors. No device's own number, since
the order of sums follows from it."""

_LEAST_RUN = 8
"""Blocks of 128 channels that a program computes at least."""

_FOUR = 4
_BLOCK = tl.constexpr(BLOCK)


def linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """`model.fp8.linear` of x, bfloat16 [M, K] in contiguous rows, and a weight fp8 [N, K]: bfloat16 [M, N].

    K has to be a multiple of 16. Raises ValueError for tensors that do not fit together.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"expected bfloat16, found {x.dtype}")
    return linear_quantised(*quantise(x, power_of_two), weight, scales)


def linear_quantised(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """`linear` of activations that are quantised already, as `triton_fp8.quantise` returns them."""
    return reduced(linear_in_parts(x, x_scales, weight, scales))


def linear_in_parts(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """`linear_quantised`, or float32 [parts, M, N], which `reduced` makes of it."""
    if len(x) > FEW and _torch_computes(weight):
        return torch_product(x, x_scales, weight, scales)
    return partial_product(x, x_scales, weight, scales)


def mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    power_of_two: bool,
) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) of x, bfloat16 [M, H]. gate_up: [2 * W, H], the rows of gate first. down: [H, W].

    Each projection is rounded to bfloat16. W has to be a multiple of 128, that no block holds rows of gate and of up.
    """
    return mlp_quantised(*quantise(x, power_of_two), gate_up, gate_up_scales, down, down_scales, power_of_two)


def mlp_quantised(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    power_of_two: bool,
) -> torch.Tensor:
    """`mlp` of activations that are quantised already, as `triton_fp8.quantise` returns them."""
    if down.shape[1] % BLOCK:
        raise ValueError(f"expected a width that is a multiple of {BLOCK}, found {down.shape[1]}")
    both = linear_in_parts(x, x_scales, gate_up, gate_up_scales)
    return linear_quantised(*swiglu_quantise(both, power_of_two), down, down_scales)


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
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    tiling: Tiling | None = None,
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
    if m and n:
        with on(x.device):
            _linear[(triton.cdiv(n, cut.n), splits, triton.cdiv(m, cut.m))](
                described(weight, cut.n),
                scales,
                x,
                x_scales,
                x_scales.stride(1),
                out,
                m,
                n,
                k,
                blocks(k),
                run if splits > 1 else blocks(k),
                ragged=k % BLOCK != 0,
                tokens_left=cut.tokens_left,
                block_n=cut.n,
                block_m=cut.m,
                stages=cut.stages,
                unroll=cut.unroll,
                num_warps=cut.warps,
                maxnreg=cut.registers,
                **chained(x.device),
            )
    return out


def reduced(partial: torch.Tensor) -> torch.Tensor:
    """The sum over splits, rounded: bfloat16 [M, N]."""
    if partial.dim() == 2:
        return partial
    splits, m, n = partial.shape
    out = torch.empty(m, n, dtype=torch.bfloat16, device=partial.device)
    block = 512
    with on(partial.device):
        _add_up[(triton.cdiv(m * n, block),)](
            partial, out, m * n, splits, block, num_warps=4, **chained(partial.device)
        )
    return out


@triton.jit(do_not_specialize=["x_scale_block_stride", "m", "num_blocks", "run"])  # type: ignore[untyped-decorator]
def _linear(
    weight: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    x_scale_block_stride: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    num_blocks: tl.tensor,
    run: tl.tensor,
    ragged: tl.constexpr,
    tokens_left: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    stages: tl.constexpr,
    unroll: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """One tile over one run of channels."""
    follow(chained)
    first_row = tl.program_id(0) * block_n
    split = tl.program_id(1)
    token = tl.program_id(2) * block_m + tl.arange(0, block_m)
    begin = split * run
    end = tl.minimum(begin + run, num_blocks)
    weight_scale = scales + (first_row // _BLOCK).to(tl.int64) * num_blocks
    total = multiply(
        weight,
        first_row,
        weight_scale,
        x,
        k,
        x_scales,
        1,
        x_scale_block_stride,
        token,
        token < m,
        begin,
        end,
        run,
        k,
        ragged,
        False,
        tokens_left,
        block_n,
        block_m,
        stages,
        unroll,
    )
    row = first_row + tl.arange(0, block_n)
    place = (split.to(tl.int64) * m + token)[:, None] * n + row[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(token < m)[:, None] & (row < n)[None, :])


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def _add_up(
    partial: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    splits: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """A block of the sum over the splits of partial [splits, size]."""
    follow(chained)
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = place < size
    total = tl.load(partial + place, mask=real, other=0.0)
    for split in tl.static_range(1, splits):
        total += tl.load(partial + split * size.to(tl.int64) + place, mask=real, other=0.0)
    tl.store(out + place, total.to(tl.bfloat16), mask=real)
