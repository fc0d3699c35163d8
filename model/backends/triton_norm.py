"""RMSNorm as a Triton kernel that adds before and quantises behind: what a layer does between two products."""

import torch
import triton
import triton.language as tl

from model.backends.triton_chain import chained, follow
from model.backends.triton_fp8 import new_quantised, on, quantised
from model.fp8 import BLOCK, FP8, blocks
from model.linear import Activations
from model.quantization import BlockFp8

_BLOCK = tl.constexpr(BLOCK)
_PER_THREAD = 32
"""Elements of a row that a thread holds."""


def rms_norm(
    hidden: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    fp8: BlockFp8 | None,
    room: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Activations]:
    """`model.norm.RmsNorm.of_sum` of bfloat16 [N, dim] in contiguous rows.

    addend: of the same type and shape, or contiguous float32 [parts, N, dim], whose sum over the parts is rounded.
    What is quantised is the norm after rounding, as by `triton_fp8.quantise`. room: values [N, dim] in contiguous rows
    and scales [N, ceil(dim / 128)] of any strides, to be written; None: new tensors. Raises ValueError for tensors that
    do not fit together.
    """
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
    if count:
        with on(hidden.device):
            _rms_norm[(count,)](
                hidden,
                addend,
                weight,
                summed,
                dense,
                values,
                scales,
                hidden.stride(0),
                0 if addend is None else addend.stride(-2),
                0 if values is None else values.stride(0),
                *((0, 0) if scales is None else scales.stride()),
                count,
                dim,
                eps,
                fp8 is not None and fp8.power_of_two,
                parts,
                block,
                num_warps=max(1, min(16, block // 32 // _PER_THREAD)),
                **chained(hidden.device),
            )
    return summed, Activations(dense, values, scales)


@triton.jit(do_not_specialize=["block_stride", "count"])  # type: ignore[untyped-decorator]
def _rms_norm(
    hidden: tl.tensor,
    addend: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    dense: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    hidden_stride: tl.tensor,
    addend_stride: tl.tensor,
    values_stride: tl.tensor,
    scales_stride: tl.tensor,
    block_stride: tl.tensor,
    count: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    power_of_two: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
) -> None:
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
