"""Each token's weighted sum of what its experts computed, as a Triton kernel."""

import torch
import triton
import triton.language as tl

from model.backends.triton_chain import chained, follow
from model.backends.triton_fp8 import on
from model.backends.triton_fp8_sort import Sorted

_SUMMED = 1024
"""Channels of a token's sum that one program adds up."""

_SUM_TOKENS = 256
"""With more tokens programs add up twice as many channels, so that all of them run at once."""


def weighted_sum(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    order: Sorted,
    first_expert: int,
    count: int,
    beside: torch.Tensor | None,
    begin: int,
    out: torch.Tensor,
) -> None:
    """Write the tokens of ids and weights [T, k], which are those of `out`, bfloat16 [all tokens, H], from `begin` on.

    rows: bfloat16 [P, H], or float32 [splits, P, H], of which the sum over the splits is rounded first. The rows of ids
    and weights are contiguous, and may lie apart. count: experts here that ids choose among, from first_expert on;
    others contribute nothing. beside: bfloat16, added to `out`.
    """
    tokens, top_k = ids.shape
    size = out.shape[1]
    if beside is not None and (beside.shape != out.shape or not beside.is_contiguous()):
        raise ValueError(f"expected contiguous tokens {list(out.shape)} beside, found {list(beside.shape)}")
    block = _SUMMED if tokens <= _SUM_TOKENS else 2 * _SUMMED
    if tokens:
        with on(out.device):
            _weigh[(tokens, triton.cdiv(size, block))](
                rows,
                ids,
                ids.stride(0),
                weights,
                weights.stride(0),
                order.row,
                order.counts,
                beside,
                out,
                begin,
                order.shared.start,
                len(order.shared),
                len(order.pairs),
                size,
                first_expert,
                count,
                top_k,
                splits=len(rows) if rows.dim() == 3 else 1,
                block=block,
                num_warps=4,
                **chained(out.device),
            )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["begin", "shared_first", "shared_count", "num_rows", "first_expert", "count"]
)
def _weigh(
    rows: tl.tensor,
    ids: tl.tensor,
    ids_stride: tl.tensor,
    weights: tl.tensor,
    weights_stride: tl.tensor,
    row_of: tl.tensor,
    counts: tl.tensor,
    beside: tl.tensor,
    out: tl.tensor,
    begin: tl.tensor,
    shared_first: tl.tensor,
    shared_count: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    first_expert: tl.tensor,
    count: tl.tensor,
    top_k: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """A block of one token's weighted sum."""
    follow(chained)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(top_k):
        local = tl.load(ids + token * ids_stride + choice) - first_expert
        here = (local >= 0) & (local < count)
        row = tl.load(row_of + token * top_k + choice, mask=here, other=0)
        value = _row(rows, row, here & (column < size), column, num_rows, size, splits)
        total += tl.load(weights + token * weights_stride + choice, mask=here, other=0.0) * value
    number = tl.program_id(0) - shared_first
    here = (number >= 0) & (number < shared_count)
    row = tl.load(counts, mask=here, other=0) - shared_count + number
    total += _row(rows, row, here & (column < size), column, num_rows, size, splits)
    place = (begin + token) * size + column
    if beside is not None:
        total += tl.load(beside + place, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(tl.bfloat16), mask=column < size)


@triton.jit  # type: ignore[untyped-decorator]
def _row(
    rows: tl.tensor,
    row: tl.tensor,
    real: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    splits: tl.constexpr,
) -> tl.tensor:
    """A block of the sum over the splits of one row, rounded to bfloat16; zeros where it is not real."""
    place = rows + row.to(tl.int64) * size + column
    value = tl.load(place, mask=real, other=0.0).to(tl.float32)
    for split in tl.static_range(1, splits):
        value += tl.load(place + split * (num_rows.to(tl.int64) * size), mask=real, other=0.0)
    return value.to(tl.bfloat16).to(tl.float32)
