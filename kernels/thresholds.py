"""The threshold that top-k and top-p set: logits above it stay, and some of those equal to it.

The likeliest 1024 tokens nearly always decide it, and finding them is much cheaper than sorting a vocabulary. If they
do not (top_k is larger, or the logits are so flat that they have less than top_p), all tokens are searched.
"""

from dataclasses import dataclass

import torch

CANDIDATES = 1024


@dataclass(frozen=True)
class Threshold:
    """least: float32 [n, 1]. equals: int64 [n, 1], how many of the tokens that equal it stay, at least 1."""

    least: torch.Tensor
    equals: torch.Tensor


def find_threshold(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, candidates: int = CANDIDATES
) -> Threshold:
    """See `kernels.ops.Ops`. On CUDA all tokens are sorted at once, since the host does not wait to know which rows are
    decided."""
    threshold, decided = among_likeliest(scaled, top_k, top_p, scaled.shape[1] if scaled.is_cuda else candidates)
    if not scaled.is_cuda and not bool(decided.all()):
        rows = (~decided).nonzero().squeeze(1)
        exact, _ = among_likeliest(scaled[rows], top_k[rows], top_p[rows], scaled.shape[1])
        threshold.least[rows], threshold.equals[rows] = exact.least, exact.equals
    return threshold


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
