"""RMSNorm as a Triton kernel that adds before and quantises after: what a layer does between two products."""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.fp8 import BLOCK, FP8, blocks
from kernels.operands import Activations, BlockFp8, Pair, RmsNorm
from kernels.triton.fp8_quantise import new_quantised, quantised
from kernels.triton.launch import follow, launch

_BLOCK = tl.constexpr(BLOCK)
_PER_THREAD = 32
"""Elements of a row that a thread holds."""


def add_rms_norm(
    hidden: torch.Tensor,
    addend: torch.Tensor | None,
    norm: RmsNorm,
    fp8: BlockFp8 | None = None,
    room: Pair | None = None,
) -> tuple[torch.Tensor, Activations]:
    """See `kernels.ops.Ops`; bfloat16 [N, dim] in contiguous rows, an addend in parts contiguous.

    What is quantised is the norm after rounding, as by `quantise`. Raises ValueError for tensors that do not fit
    together.
    """
    weight = norm.weight
    (count, dim), summed = hidden.shape, hidden
    parts, rows = 0, [hidden, weight]
    fits = weight.shape == (dim,) and (addend is None or addend.shape[-2:] == hidden.shape)
    if addend is not None and addend.dim() == 3:
        parts = len(addend)
        fits &= addend.dtype == torch.float32 and addend.is_contiguous()
    elif addend is not None:
        rows.append(addend)
    if not fits or any(one.dtype != torch.bfloat16 or one.stride(-1) != 1 for one in rows):
        found = [(list(one.shape), one.dtype, one.stride()) for one in (hidden, weight, addend) if one is not None]
        raise ValueError(
            f"expected hidden and addend [N, {dim}] and a weight [{dim}], all bfloat16 in contiguous rows, or an "
            f"addend in contiguous parts of float32, found {found}"
        )
    if addend is not None:
        summed = torch.empty(count, dim, dtype=hidden.dtype, device=hidden.device)
    dense = torch.empty(count, dim, dtype=hidden.dtype, device=hidden.device)
    values, scales = (None, None) if fp8 is None else room or new_quantised(count, dim, hidden.device)
    if values is not None and scales is not None:
        fits = values.shape == (count, dim) and values.dtype == FP8 and values.stride(1) == 1
        if not fits or scales.shape != (count, blocks(dim)) or scales.dtype != torch.float32:
            found = [(list(one.shape), one.dtype, one.stride()) for one in (values, scales)]
            raise ValueError(f"expected room for values [{count}, {dim}] in fp8 and float32 scales, found {found}")
    block = max(BLOCK, triton.next_power_of_2(dim))
    launch(
        _rms_norm, (count,), hidden.device,
        hidden, addend, weight, summed, dense, values, scales,
        hidden.stride(0), 0 if addend is None else addend.stride(-2), 0 if values is None else values.stride(0),
        *((0, 0) if scales is None else scales.stride()),
        count, dim, norm.eps, fp8 is not None and fp8.power_of_two, parts, block,
        num_warps=max(1, min(16, block // 32 // _PER_THREAD)),
    )  # fmt: skip
    return summed, Activations(dense, values, scales)


@triton.jit(do_not_specialize=["block_stride", "count"])
def _rms_norm(
    hidden: tensor, addend: tensor, weight: tensor, summed: tensor, dense: tensor, values: tensor, scales: tensor,
    hidden_stride: tensor, addend_stride: tensor, values_stride: tensor,
    scales_stride: tensor, block_stride: tensor,
    count: tensor, dim: tensor, eps: tensor, power_of_two: constexpr, parts: constexpr, block: constexpr,
    chained: constexpr,
) -> None:  # fmt: skip
    """One row. scales_stride, block_stride: from a scale to the next row's, and to that of the row's next block. parts:
    of the addend in float32; 0: it is bfloat16."""
    follow(chained)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    real = column < dim
    factor = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    number = tl.load(hidden + row * hidden_stride + column, mask=real, other=0.0).to(tl.float32)
    if addend is not None:
        added = tl.load(addend + row * addend_stride + column, mask=real, other=0.0)
        for part in tl.static_range(1, parts):
            added += tl.load(addend + (part * count + row) * addend_stride + column, mask=real, other=0.0)
        number += added.to(tl.bfloat16).to(tl.float32)
        rounded = number.to(tl.bfloat16)
        tl.store(summed + row * dim + column, rounded, mask=real)
        number = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(number * number, 0) / dim + eps)
    normed = (number * inverse * factor).to(tl.bfloat16)
    tl.store(dense + row * dim + column, normed, mask=real)
    if values is not None:
        value, scale = quantised(tl.reshape(normed.to(tl.float32), [block // _BLOCK, _BLOCK]), power_of_two)
        tl.store(values + row * values_stride + column, tl.reshape(value, [block]), mask=real)
        group = tl.arange(0, block // _BLOCK)
        tl.store(scales + row * scales_stride + group.to(tl.int64) * block_stride, scale, mask=group * _BLOCK < dim)
