"""`kernels.ops.Ops` in plain torch: runs anywhere, operation by operation in transformers' order.

In block-fp8 it computes what `kernels.fp8` defines.
"""

import torch
import torch.nn.functional as F

from kernels import fp8
from kernels.operands import (
    Activations,
    BlockFp8,
    Pair,
    PartialSums,
    RmsNorm,
    Rope,
    RouterConfig,
    SwiGluWeights,
    Threshold,
)

quantise = fp8.quantise_activations
experts_fp8 = fp8.experts
CANDIDATES = 1024
"""Likeliest tokens, which nearly always decide a threshold. Finding them is much cheaper than sorting a vocabulary."""
_ALL_AT_ONCE_BYTES = 1 << 30
"""Every expert computes every token if what that makes is at most so large."""


def add_rms_norm(
    hidden: torch.Tensor,
    addend: torch.Tensor | None,
    norm: RmsNorm,
    fp8: BlockFp8 | None = None,
    room: Pair | None = None,
) -> tuple[torch.Tensor, Activations]:
    if addend is not None:
        hidden = hidden + addend
    dense = norm(hidden)
    if fp8 is None:
        return hidden, Activations(dense)
    return hidden, Activations(dense, *_written(quantise(dense, fp8.power_of_two), room))


def rotate(x: torch.Tensor, beside: torch.Tensor, rope: Rope, *, interleaved: bool, beside_first: bool) -> torch.Tensor:
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    rotated = (first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin)
    return torch.cat((beside, *rotated) if beside_first else (*rotated, beside), dim=-1)


def absorb(query_nope: torch.Tensor, query_rope: torch.Tensor, key_map: torch.Tensor, rope: Rope) -> torch.Tensor:
    absorbed = torch.einsum("nhd,hdr->nhr", query_nope, key_map)
    return rotate(query_rope, absorbed, rope, interleaved=True, beside_first=True)


def float32_product(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> PartialSums:
    return PartialSums(F.linear(x.float(), weight.float()).unsqueeze(0), scale)


def choose_experts(
    logits: PartialSums,
    bias: torch.Tensor,
    rule: RouterConfig,
    room: Pair | None = None,
    positions: torch.Tensor | None = None,
) -> Pair:
    """Ties are broken as by torch.topk, in no order of experts."""
    scores = logits.reduce().sigmoid()
    ranked = scores + bias
    if rule.groups > 1:
        grouped = ranked.view(len(ranked), rule.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(rule.top_groups, dim=-1, sorted=False).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        ranked = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
    ids = ranked.topk(rule.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if rule.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if positions is not None:
        ids = ids.masked_fill(positions[:, None] < 0, -1)
    return _written((weights * rule.scale, ids), room)


def experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    is_part: bool,
) -> torch.Tensor:
    count, width, _ = gate_up.shape
    if hidden.is_cuda and count * len(hidden) * width * hidden.element_size() <= _ALL_AT_ONCE_BYTES:
        return experts_all_at_once(hidden, ids, weights, gate_up, down)
    return experts_one_by_one(hidden, ids, weights, gate_up, down)


def experts_one_by_one(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Waits to know which experts were chosen. In the order in which transformers adds up."""
    total = torch.zeros_like(hidden)
    for expert in range(len(gate_up)):
        choice, token = torch.where(ids.t() == expert)
        if len(token):
            computed = F.linear(swiglu(F.linear(hidden[token], gate_up[expert])), down[expert])
            total.index_add_(0, token, (computed * weights[token, choice, None]).to(hidden.dtype))
    return total


def experts_all_at_once(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Waits for nothing, so that it can be recorded: every expert computes every token."""
    chosen = torch.arange(len(gate_up), device=ids.device) == ids.unsqueeze(-1)
    weight_of = (weights.unsqueeze(-1) * chosen).sum(1)
    computed = torch.bmm(swiglu(torch.matmul(hidden, gate_up.transpose(1, 2))), down.transpose(1, 2))
    return torch.einsum("enh,ne->nh", computed.float(), weight_of).to(hidden.dtype)


def experts_grouped(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    is_part: bool,
) -> torch.Tensor:
    """In bfloat16 on CUDA: pairs of a token and an expert are sorted by expert, and each projection is one grouped
    product over them. Pairs of experts that other processes have come last, and count nothing."""
    count = len(gate_up)
    present = (ids >= 0) & (ids < count)
    expert_of, pairs = torch.where(present, ids, count).flatten().sort()
    ends = torch.searchsorted(expert_of, torch.arange(count, device=ids.device), right=True, out_int32=True)
    both = F.grouped_mm(hidden[pairs // ids.shape[1]], gate_up.transpose(1, 2), offs=ends)
    computed = F.grouped_mm(swiglu(both), down.transpose(1, 2), offs=ends)
    by_token = torch.empty_like(computed)
    by_token[pairs] = computed
    weighted = by_token.view(*ids.shape, -1) * weights.unsqueeze(-1)
    if is_part:  # what was not computed may be no number
        weighted = weighted.where(present.unsqueeze(-1), 0.0)
    return weighted.sum(1).to(hidden.dtype)


def linear_fp8(x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return fp8.product(x, x_scales, weight, scales, torch.bfloat16)


def reduce_fp8(parts: torch.Tensor) -> torch.Tensor:
    return parts


def mlp_fp8(x: torch.Tensor, x_scales: torch.Tensor, weights: SwiGluWeights) -> torch.Tensor:
    return fp8.mlp(x, x_scales, weights, torch.bfloat16)


def find_threshold(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> Threshold:
    """See `kernels.ops.Ops`. On CUDA all tokens are sorted at once, since the host does not wait to know which rows are
    decided."""
    threshold, decided = among_likeliest(scaled, top_k, top_p, scaled.shape[1] if scaled.is_cuda else CANDIDATES)
    if not scaled.is_cuda and not bool(decided.all()):
        rows = (~decided).nonzero().squeeze(1)
        exact, _ = among_likeliest(scaled[rows], top_k[rows], top_p[rows], scaled.shape[1])
        threshold.least[rows], threshold.equals[rows] = exact.least, exact.equals
    return threshold


def perturb(
    scores: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    tokens = torch.arange(scores.shape[1], device=scores.device) if tokens is None else tokens
    number = keys[:, None] + (tokens + 1) * _signed(GOLDEN_GAMMA)
    for shift, factor in zip((30, 27, 31), (*map(_signed, MIX), 1), strict=True):
        # An arithmetic shift, whose copies of the sign are cut off.
        number ^= (number >> shift) & ((1 << (64 - shift)) - 1)
        number *= factor
    uniform = ((number >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    noise = uniform.log_().neg_().log_().neg_().float()
    is_random, divisor = temperature[:, None] > 0, temperature[:, None].clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(is_random, scores / divisor + noise, scores)


GOLDEN_GAMMA, MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The constants of SplitMix64."""


def _signed(number: int) -> int:
    """The int64 with the bits of a uint64."""
    return number - (1 << 64) if number >> 63 else number


def among_likeliest(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, candidates: int
) -> tuple[Threshold, torch.Tensor]:
    """The thresholds by that many likeliest tokens, and which rows they decide: bool [n]."""
    vocab = scaled.shape[1]
    # By value rather than by which tokens they are: which of equals are among the likeliest is not defined.
    ordered = scaled.topk(min(candidates, vocab), dim=-1).values
    ranks = torch.arange(ordered.shape[1], device=scaled.device)
    weights = ordered.exp().double().masked_fill(ranks >= top_k, 0.0)
    total = torch.where(
        top_k < vocab, weights.sum(-1, keepdim=True), scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    )
    likelier = weights.cumsum(dim=-1) - weights
    stays = (ranks < top_k) & ((likelier < top_p * total) | (top_p >= 1) | (ranks == 0))
    count = stays.sum(dim=-1, keepdim=True)
    least = ordered.gather(1, count - 1)
    equals = count - (ordered > least).sum(dim=-1, keepdim=True)
    free = (top_k >= vocab) & (top_p >= 1)
    least = least.masked_fill(free, float("-inf"))
    decided = free | (top_k <= ordered.shape[1]) | ((top_k >= vocab) & (count < ordered.shape[1]))
    # With all tokens at hand there is nothing left to find.
    decided |= ordered.shape[1] == vocab
    return Threshold(least, equals), decided.squeeze(1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 * width]: [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _written(made: Pair, room: Pair | None) -> Pair:
    """What was made, in the room for it."""
    if room is None:
        return made
    for place, one in zip(room, made, strict=True):
        place.copy_(one)
    return room
