"""Products of few tokens with a weight of few rows (split-K), and the choice of experts by a router's.

Routers and the heads' weights of indexers are such products, summed in float32. A warp chooses the experts of a token.

A weight of 64 to 256 rows is read in about a microsecond, if all multiprocessors read at once. So each program
multiplies some rows by a run of channels, which it reads with loads that are all in flight together, and writes partial
sums. The order of additions depends on the shape of the weight alone.

Factors are multiplied by tensor cores in bfloat16, whose products are exact in float32. A weight in float32 is cut into
three bfloat16 numbers that together are the same number, as far as the smallest of them is not below what bfloat16 has.
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels import torch_ops
from kernels.operands import Pair, PartialSums, RouterConfig
from kernels.triton.launch import MIN_TILE, follow, launch

MOST_TOKENS = 128
"""The most tokens that the kernel multiplies. For more of them there is more arithmetic than reading."""
_CHANNELS = 256
"""Per program: 28 runs of a hidden size of 7168, and with it as many partial sums."""
_STEP = 128
"""Channels that are copied to shared memory together."""
_MOST_ROWS = 64
_ROW_TILES = 4
"""As many as a weight has rows for, so that runs times tiles come near the number of multiprocessors."""
_MOST_TOKENS = 64
"""Per program."""


def float32_product(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> PartialSums:
    """See `kernels.ops.Ops`. Factors are not converted, since products of bfloat16 numbers are exact in float32."""
    if len(x) <= MOST_TOKENS:
        return PartialSums(partial_products(x, weight), scale)
    if weight.dtype == x.dtype:
        return PartialSums(torch.mm(x, weight.t(), out_dtype=torch.float32).unsqueeze(0), scale)
    return torch_ops.float32_product(x, weight, scale)


def partial_products(
    x: torch.Tensor, weight: torch.Tensor, block_rows: int | None = None, block_channels: int = _CHANNELS
) -> torch.Tensor:
    """Parts of x times the transpose of the weight, float32 [parts, N, rows]: their sum over the parts is the product.

    x: bfloat16 [N, channels], each row contiguous. weight: bfloat16 or float32 [rows, channels], contiguous.
    block_rows, block_channels: powers of two from 16, of one program, which change the order of additions. Raises
    ValueError for other tensors.
    """
    (tokens, channels), rows = x.shape, len(weight)
    if weight.shape != (rows, channels) or x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"expected contiguous rows of {channels} channels, found {tuple(weight.shape)} of strides "
            f"{weight.stride()} and x of strides {x.stride()}"
        )
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"expected bfloat16 times bfloat16 or float32, found {x.dtype} and {weight.dtype}")
    block_rows = block_rows or min(_MOST_ROWS, max(MIN_TILE, triton.next_power_of_2(triton.cdiv(rows, _ROW_TILES))))
    block_tokens = min(_MOST_TOKENS, max(MIN_TILE, triton.next_power_of_2(tokens)))
    runs = triton.cdiv(channels, block_channels)
    parts = torch.empty((runs, tokens, rows), dtype=torch.float32, device=x.device)
    launch(
        _partial_products, (triton.cdiv(rows, block_rows), runs, triton.cdiv(tokens, block_tokens)), x.device,
        x, weight, parts, tokens, x.stride(0), rows, channels,
        block_rows=block_rows, block_channels=block_channels, block_tokens=block_tokens,
        step=min(_STEP, block_channels), num_warps=4,
    )  # fmt: skip
    return parts


@triton.jit(do_not_specialize=["tokens"])
def _partial_products(
    x: tensor, weight: tensor, parts: tensor, tokens: tensor, token_stride: tensor,
    rows: constexpr, channels: constexpr,
    block_rows: constexpr, block_channels: constexpr, block_tokens: constexpr,
    step: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """Some rows of the weight, one run of channels, some tokens. Rows come first, since tokens may be fewer than the
    tensor cores' tiles, whose shape must not depend on how many there are."""
    follow(chained)
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    token = tl.program_id(2) * block_tokens + tl.arange(0, block_tokens)
    total = tl.zeros([block_rows, block_tokens], tl.float32)
    small = tl.zeros([block_rows, block_tokens], tl.float32)
    # One stage more than turns: the copies of all turns are on their way before the first is waited for.
    for begin in tl.range(0, block_channels, step, num_stages=block_channels // step + 1):
        channel = tl.program_id(1) * block_channels + begin + tl.arange(0, step)[None, :]
        here = (row < rows)[:, None] & (channel < channels)
        factor = tl.load(weight + row[:, None] * channels + channel, mask=here, other=0.0)
        here = (token < tokens)[:, None] & (channel < channels)
        other = tl.trans(tl.load(x + token[:, None] * token_stride + channel, mask=here, other=0.0))
        if factor.dtype == tl.float32:
            first = factor.to(tl.bfloat16)
            rest = factor - first.to(tl.float32)
            second = rest.to(tl.bfloat16)
            third = (rest - second.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(first, other, total)
            # Apart, since tensor cores cut off what they add to a sum below its last bit.
            small = tl.dot(third, other, tl.dot(second, other, small))
        else:
            total = tl.dot(factor, other, total)
    place = parts + (tl.program_id(1) * tokens + token)[None, :] * rows + row[:, None]
    tl.store(place, total + small, mask=(token < tokens)[None, :] & (row < rows)[:, None])


_PARTS = 4
"""Parts of logits that are copied to shared memory together."""


def choose_experts(
    logits: PartialSums,
    bias: torch.Tensor,
    rule: RouterConfig,
    room: Pair | None = None,
    positions: torch.Tensor | None = None,
) -> Pair:
    """See `kernels.ops.Ops`; best expert first, and of equal ones the first.

    NaN too gets ids of experts that exist. The rows of room are contiguous. Raises ValueError for room that does not
    fit.
    """
    parts = logits.parts.contiguous()
    num_parts, tokens, experts = parts.shape
    if room is None:
        weights = parts.new_empty(tokens, rule.top_k)
        room = weights, torch.empty_like(weights, dtype=torch.int64)
    weights, ids = room
    if any(one.shape != (tokens, rule.top_k) or one.stride(1) != 1 for one in room) or weights.dtype != torch.float32:
        found = [(list(one.shape), one.dtype, one.stride()) for one in room]
        raise ValueError(f"expected float32 weights and ids [{tokens}, {rule.top_k}] in rows, found {found}")
    launch(
        _choose, (tokens,), parts.device,
        parts, bias, ids if positions is None else positions.contiguous(),
        weights, weights.stride(0), ids, ids.stride(0),
        tokens, logits.scale, rule.scale,
        num_parts, rule.top_k, rule.groups, experts // rule.groups, rule.top_groups, rule.normalise,
        block_parts=min(_PARTS, triton.next_power_of_2(num_parts)), block_k=triton.next_power_of_2(rule.top_k),
        block_groups=triton.next_power_of_2(rule.groups),
        block_members=triton.next_power_of_2(experts // rule.groups), padded=positions is not None,
        num_warps=1,
    )  # fmt: skip
    return weights, ids


_NEVER = tl.constexpr(-(2**31))
"""The order of what is not chosen, or not any more: before all numbers."""


@triton.jit
def _order(x: tensor) -> tensor:
    """Integers in the order of float32 numbers. A GPU finds the largest integer of a warp in one instruction."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    logit_parts: tensor, bias: tensor, positions: tensor,
    weights: tensor, weights_stride: tensor, ids: tensor, ids_stride: tensor,
    tokens: tensor, logit_scale: tensor, scale: tensor,
    num_parts: constexpr, top_k: constexpr, groups: constexpr, members: constexpr, top_groups: constexpr,
    normalise: constexpr,
    block_parts: constexpr, block_k: constexpr, block_groups: constexpr, block_members: constexpr, padded: constexpr,
    chained: constexpr,
) -> None:  # fmt: skip
    """One token. members: experts per group. padded: positions below 0 are padding's."""
    follow(chained)
    token = tl.program_id(0).to(tl.int64)
    block: tl.constexpr = block_groups * block_members
    experts: tl.constexpr = groups * members
    place = tl.arange(0, block)
    expert = place // block_members * members + place % block_members
    real = (place < groups * block_members) & (place % block_members < members)
    correction = tl.load(bias + expert, mask=real, other=0.0)
    logit = tl.zeros([block], tl.float32)
    # One stage more than turns: all parts are on their way to shared memory before the first is waited for.
    for begin in tl.range(0, num_parts, block_parts, num_stages=(num_parts + block_parts - 1) // block_parts + 1):
        part = begin + tl.arange(0, block_parts)[:, None]
        here = logit_parts + (part.to(tl.int64) * tokens + token) * experts + expert[None, :]
        logit += tl.sum(tl.load(here, mask=(part < num_parts) & real[None, :], other=0.0), 0)
    expert = tl.where(real, expert, experts)
    score = 1.0 / (1.0 + tl.exp(-logit * logit_scale))
    rank = score + correction

    order = tl.where(real, _order(rank), _NEVER)
    if top_groups < groups:
        group = tl.arange(0, block_groups)
        rank = tl.reshape(tl.where(real, rank, float("-inf")), [block_groups, block_members])
        best = tl.max(rank, 1)
        is_best = tl.arange(0, block_members)[None, :] == tl.argmax(rank, 1)[:, None]
        both = best + tl.max(tl.where(is_best, float("-inf"), rank), 1)
        both = tl.where(group < groups, both, float("-inf"))
        chosen = group < 0
        for _ in tl.static_range(top_groups):
            chosen |= group == tl.argmax(tl.where(chosen, float("-inf"), both), 0)
        chosen = tl.broadcast_to(chosen[:, None], [block_groups, block_members])
        order = tl.where(tl.reshape(chosen, [block]), order, _NEVER)

    turn = tl.arange(0, block_k)
    taken_ids = tl.zeros([block_k], tl.int32)
    for number in tl.static_range(top_k):
        taken = tl.min(tl.where(order == tl.max(order, 0), expert, experts - 1), 0)
        taken_ids = tl.where(turn == number, taken, taken_ids)
        order = tl.where(expert == taken, _NEVER, order)
    total = tl.gather(score, taken_ids // members * block_members + taken_ids % members, 0)
    total = tl.where(turn < top_k, total, 0.0)
    if normalise:
        total = total / (tl.sum(total, 0) + 1e-20)
    if padded:
        taken_ids = tl.where(tl.load(positions + token) < 0, -1, taken_ids)
    tl.store(weights + token * weights_stride + turn, total * scale, mask=turn < top_k)
    tl.store(ids + token * ids_stride + turn, taken_ids.to(ids.dtype.element_ty), mask=turn < top_k)
