"""The choice of a token's experts as a Triton kernel: one warp per token, which holds all of its scores."""

import torch
import triton
import triton.language as tl

from model.backends.triton_chain import chained, follow
from model.backends.triton_fp8 import on
from model.config import RouterConfig
from model.partial_sums import PartialSums

_PARTS = 4
"""Parts of logits that are copied to shared memory together."""


def choose_experts(
    logits: PartialSums,
    bias: torch.Tensor,
    config: RouterConfig,
    room: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Router.choose` of logits [N, experts], best expert first, and of equal ones the first.

    NaN too gets ids of experts that exist. room: weights, float32, and ids, int32 or int64, both [N, top_k] in
    contiguous rows, to be written; None: new tensors. Raises ValueError for room that does not fit.
    """
    parts = logits.parts.contiguous()
    num_parts, tokens, experts = parts.shape
    if room is None:
        weights = parts.new_empty(tokens, config.top_k)
        room = weights, torch.empty_like(weights, dtype=torch.int64)
    weights, ids = room
    if any(one.shape != (tokens, config.top_k) or one.stride(1) != 1 for one in room) or weights.dtype != torch.float32:
        found = [(list(one.shape), one.dtype, one.stride()) for one in room]
        raise ValueError(f"expected float32 weights and ids [{tokens}, {config.top_k}] in rows, found {found}")
    if tokens:
        with on(parts.device):
            _choose[(tokens,)](
                parts,
                bias,
                weights,
                weights.stride(0),
                ids,
                ids.stride(0),
                tokens,
                logits.scale,
                config.scale,
                num_parts,
                config.top_k,
                config.groups,
                experts // config.groups,
                config.top_groups,
                config.normalise,
                block_parts=min(_PARTS, triton.next_power_of_2(num_parts)),
                block_k=triton.next_power_of_2(config.top_k),
                block_groups=triton.next_power_of_2(config.groups),
                block_members=triton.next_power_of_2(experts // config.groups),
                num_warps=1,
                **chained(parts.device),
            )
    return weights, ids


_NEVER = tl.constexpr(-(2**31))
"""The order of what is not chosen, or not any more: before all numbers."""


@triton.jit  # type: ignore[untyped-decorator]
def _order(x: tl.tensor) -> tl.tensor:
    """Integers in the order of float32 numbers. A GPU finds the largest integer of a warp in one instruction."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _choose(
    logit_parts: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    weights_stride: tl.tensor,
    ids: tl.tensor,
    ids_stride: tl.tensor,
    tokens: tl.tensor,
    logit_scale: tl.tensor,
    scale: tl.tensor,
    num_parts: tl.constexpr,
    top_k: tl.constexpr,
    groups: tl.constexpr,
    members: tl.constexpr,
    top_groups: tl.constexpr,
    normalise: tl.constexpr,
    block_parts: tl.constexpr,
    block_k: tl.constexpr,
    block_groups: tl.constexpr,
    block_members: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """One token. members: experts per group."""
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
    tl.store(weights + token * weights_stride + turn, total * scale, mask=turn < top_k)
    tl.store(ids + token * ids_stride + turn, taken_ids.to(ids.dtype.element_ty), mask=turn < top_k)
