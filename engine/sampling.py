"""Picks the next token of each request from its logits.

Randomness is counter-based: the i-th token of a request depends on its seed, on i and on its logits, and on nothing
else. So a request may change its node or its batch in the middle and still go on with the same random stream.

Nothing waits for the device before the tokens are read: what the host has to say goes up in one copy from pinned
memory, and what it wants to know comes back in one. Logits stay float32. Sums over them are float64, so that how the
device cuts a sum, which depends on the batch, cannot move a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CANDIDATES = 1024
"""The likeliest tokens among which top_k and top_p are looked for first: sorting a whole vocabulary takes longer."""

_NOT_FINITE = -1
_UNDECIDED = -2


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens picked; the values are taken as valid.

    temperature 0 is greedy. top_k 0 or -1 and top_p 1 restrict nothing. A request that samples needs a seed: whoever
    accepts it draws one where the client gave none, so that every node continues the same stream. `logprobs` is the
    number of alternatives to report with each token, where `want_logprobs` asks for any at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int = 0
    want_logprobs: bool = False


@dataclass(frozen=True)
class Sampled:
    """A token; where the request wants them, also its log-probability and the likeliest tokens with theirs.

    Log-probabilities are those of the model: before temperature, top-k and top-p.
    """

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


@dataclass(frozen=True)
class NotSampled:
    """There is no next token, and `reason` says why."""

    reason: str


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int], candidates: int = CANDIDATES
) -> list[Sampled | NotSampled]:
    """Pick one token per row of float32 logits, shape [batch, vocab]; none for a row that is not all finite numbers.

    steps[b] is the number of tokens that request b has generated before. Waits for the device once, and a second time
    where the likeliest `candidates` do not decide: a top_k beyond them, or a top_p of logits so flat that they do not
    make it up. Raises ValueError for a request that samples without a seed.
    """
    results = _report(draw(logits, params, steps, candidates), params)
    if again := [row for row, result in enumerate(results) if result is None]:
        vocab = logits.shape[1]
        redone = sample(logits[again], [params[row] for row in again], [steps[row] for row in again], vocab)
        for row, result in zip(again, redone, strict=True):
            results[row] = result
    return [result for result in results if result is not None]


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int], candidates: int = CANDIDATES
) -> torch.Tensor:
    """Queue the sampling of a batch on the logits' device, without waiting for it.

    Returns float64 [batch, 1 + (0 or 1 + 2 n)], which `sample` reads: the token; where any request wants
    log-probabilities, the token's, the n likeliest tokens', and those tokens.
    """
    token_ids = logits.argmax(dim=-1)
    decided = torch.ones_like(token_ids, dtype=torch.bool)
    if any(p.temperature > 0 for p in params):
        temperatures, top_p, top_k, uniform = _upload(params, steps, logits)
        # Relative to the maximum, so that a tiny temperature cannot overflow; greedy rows are computed for nothing.
        temperatures = temperatures.float().clamp(min=torch.finfo(torch.float32).tiny)
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
        if any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params):
            scaled, decided = _restrict(scaled, top_k, top_p, candidates)
        token_ids = torch.where(uniform.squeeze(1) < 0, token_ids, _invert(scaled, uniform))
    token_ids = token_ids.masked_fill(~decided, _UNDECIDED)
    # Last, and whatever else was found: NaN makes every comparison before this one meaningless.
    token_ids = token_ids.masked_fill(~logits.isfinite().all(dim=-1), _NOT_FINITE)
    columns = [token_ids.unsqueeze(1)]
    if any(p.want_logprobs for p in params):
        columns += _logprobs(logits, token_ids, max(p.logprobs for p in params))
    return torch.cat([column.double() for column in columns], dim=1)


def _upload(params: Sequence[SamplingParams], steps: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Temperature, top_p, top_k and a uniform number of each row, float64 [4, batch, 1]; greedy rows have -1 for it.

    In one copy, from pinned memory: a copy from other memory waits until the device has come to it.
    """
    vocab = logits.shape[1]
    rows = [
        (p.temperature, p.top_p, min(p.top_k, vocab) if p.top_k > 0 else vocab, _uniform(p.seed, step))
        if p.temperature > 0
        else (0.0, 1.0, vocab, -1.0)
        for p, step in zip(params, steps, strict=True)
    ]
    values = torch.tensor(rows, dtype=torch.float64)
    if logits.is_cuda:
        values = values.pin_memory()
    return values.to(logits.device, non_blocking=True).T.unsqueeze(2)


def _restrict(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set to -inf all but each row's top_k likeliest tokens, and of those all but the fewest that make up top_p.

    Of equally likely tokens, those first in the vocabulary stay. Also returns which rows the candidates, being only
    the likeliest, decide: bool [batch]; the others mean nothing.
    """
    vocab = scaled.shape[1]
    ordered = scaled.topk(min(candidates, vocab), dim=-1).values
    ranks = torch.arange(ordered.shape[1], device=scaled.device)
    weights = ordered.exp().double().masked_fill(ranks >= top_k, 0.0)
    # top_p counts the probabilities that top_k leaves.
    total = torch.where(
        top_k < vocab, weights.sum(-1, keepdim=True), scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    )
    likelier = weights.cumsum(dim=-1) - weights
    # The likeliest token always stays, whatever top_p is.
    stays = (ranks < top_k) & ((likelier < top_p * total) | (top_p >= 1) | (ranks == 0))
    count = stays.sum(dim=-1, keepdim=True)
    # By value rather than by which candidates they are: which of equals become candidates is not defined.
    least = ordered.gather(1, count - 1)
    equal = scaled == least
    room = count - (ordered > least).sum(dim=-1, keepdim=True)
    keep = (scaled > least) | (equal & (equal.cumsum(dim=-1) <= room))
    free = (top_k >= vocab) & (top_p >= 1)
    decided = free | (top_k <= ordered.shape[1]) | ((top_k >= vocab) & (count < ordered.shape[1]))
    return scaled.masked_fill(~(keep | free), float("-inf")), decided.squeeze(1)


def _invert(scaled: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling: the token at which the cumulative probability passes a uniform number.

    Tokens stay in the order of the vocabulary, so that rounding that swaps two equally likely tokens changes nothing.
    """
    cumulative = scaled.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding up to the total would pick a token beyond the last possible one.
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _uniform(seed: int | None, step: int) -> float:
    """A number in [0, 1): block `step` of the Philox stream that `seed` selects (Salmon et al., SC 2011)."""
    if seed is None:
        raise ValueError("a request with a temperature above 0 needs a seed")
    bits = int(np.random.Philox(key=seed & (2**64 - 1), counter=step).random_raw())
    return (bits >> 11) * 2.0**-53


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Log-probabilities of the tokens [batch, 1], and of the `count` likeliest, with those tokens, [batch, count]."""
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    best = logits.topk(min(count, logits.shape[1]), dim=-1)
    chosen = logits.gather(1, token_ids.clamp(min=0).unsqueeze(1))
    return [chosen - log_total, best.values - log_total, best.indices]


def _report(drawn: torch.Tensor, params: Sequence[SamplingParams]) -> list[Sampled | NotSampled | None]:
    """Read what was drawn, which is the one wait; None for a row that is undecided."""
    return [_result(row, p) for row, p in zip(drawn.tolist(), params, strict=True)]


def _result(row: list[float], params: SamplingParams) -> Sampled | NotSampled | None:
    token_id = int(row[0])
    if token_id == _UNDECIDED:
        return None
    if token_id == _NOT_FINITE:
        return NotSampled("the model's logits are not finite numbers")
    if not params.want_logprobs:
        return Sampled(token_id)
    most = (len(row) - 2) // 2
    alternatives = zip(map(int, row[2 + most :]), row[2 : 2 + most], strict=True)
    return Sampled(token_id, row[1], list(alternatives)[: params.logprobs])
