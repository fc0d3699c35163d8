"""The choice of a token's experts as a Triton kernel: one warp per token, which holds all of its scores."""

import torch
import triton
import triton.language as tl

from model.config import RouterConfig


def choose_experts(logits: torch.Tensor, bias: torch.Tensor, config: RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """`Router.choose`, best expert first, and of equal ones the first. NaN too gets ids of experts that exist."""
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, config.top_k)
    ids = torch.empty_like(weights, dtype=torch.int64)
    if tokens:
        with torch.cuda.device(logits.device):
            _choose[(tokens,)](
                logits.contiguous(),
                bias,
                weights,
                ids,
                config.scale,
                config.top_k,
                config.groups,
                experts // config.groups,
                config.top_groups,
                config.normalise,
                block_k=triton.next_power_of_2(config.top_k),
                block_groups=triton.next_power_of_2(config.groups),
                block_members=triton.next_power_of_2(experts // config.groups),
                num_warps=1,
            )
    return weights, ids


@triton.jit  # type: ignore[untyped-decorator]
def _choose(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    scale: tl.tensor,
    top_k: tl.constexpr,
    groups: tl.constexpr,
    members: tl.constexpr,
    top_groups: tl.constexpr,
    normalise: tl.constexpr,
    block_k: tl.constexpr,
    block_groups: tl.constexpr,
    block_members: tl.constexpr,
) -> None:
    """One token. members: experts per group."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, block_groups)
    member = tl.arange(0, block_members)[None, :]
    real = (group < groups)[:, None] & (member < members)
    experts: tl.constexpr = groups * members
    expert = tl.where(real, group[:, None] * members + member, experts)
    logit = tl.load(logits + token * experts + expert, mask=real, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    rank = tl.where(real, score + tl.load(bias + expert, mask=real, other=0.0), float("-inf"))

    if top_groups < groups:
        best = tl.max(rank, 1)
        best_member = tl.argmax(rank, 1)[:, None]
        second = tl.max(tl.where(member == best_member, float("-inf"), rank), 1)
        both = tl.where(group < groups, best + second, float("-inf"))
        chosen = group < 0
        for _ in tl.static_range(top_groups):
            chosen |= group == tl.argmax(tl.where(chosen, float("-inf"), both), 0)
        rank = tl.where(chosen[:, None], rank, float("-inf"))

    place = tl.arange(0, block_k)
    weight = tl.zeros([block_k], tl.float32)
    taken_ids = tl.zeros([block_k], tl.int32)
    for turn in tl.static_range(top_k):
        highest = tl.max(tl.max(rank, 1), 0)
        # Nothing equals NaN.
        taken = tl.min(tl.min(tl.where(rank == highest, expert, experts - 1), 1), 0)
        weight += tl.where(place == turn, tl.sum(tl.sum(tl.where(expert == taken, score, 0.0), 1), 0), 0.0)
        taken_ids += tl.where(place == turn, taken, 0)
        rank = tl.where(expert == taken, float("-inf"), rank)
    if normalise:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + token * top_k + place, weight * scale, mask=place < top_k)
    tl.store(ids + token * top_k + place, taken_ids.to(tl.int64), mask=place < top_k)
