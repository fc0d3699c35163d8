"""Picks the next token of each request from its logits.

Randomness is counter-based: the i-th token of a request depends on its seed, on i and on its logits, and on nothing
else. So a request may change its node or its batch in the middle and still go on with the same random stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


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


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[Sampled]:
    """Pick one token per row of float32 logits, shape [batch, vocab].

    steps[b] is the number of tokens that request b has generated before. Raises ValueError for a request that samples
    without a seed.
    """
    token_ids = logits.argmax(dim=-1)
    random_rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if random_rows:
        token_ids[random_rows] = _sample_random(
            logits[random_rows], [params[row] for row in random_rows], [steps[row] for row in random_rows]
        )
    sampled = [Sampled(token_id) for token_id in token_ids.tolist()]
    report_rows = [row for row, p in enumerate(params) if p.want_logprobs]
    if report_rows:
        counts = [params[row].logprobs for row in report_rows]
        reports = _logprobs(logits[report_rows], token_ids[report_rows], counts)
        for row, report in zip(report_rows, reports, strict=True):
            sampled[row] = report
    return sampled


def _sample_random(logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> torch.Tensor:
    """Inverse transform sampling: the token at which the cumulative probability passes a uniform number.

    Tokens stay in the order of the vocabulary, so that rounding that swaps two equally likely tokens changes nothing.
    """
    temperatures = logits.new_tensor([p.temperature for p in params], dtype=torch.float64).unsqueeze(1)
    # Relative to the maximum, so that a tiny temperature cannot overflow.
    scaled = (logits.double() - logits.amax(dim=-1, keepdim=True)) / temperatures
    restricted = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if restricted:
        scaled[restricted] = _restrict(scaled[restricted], [params[row] for row in restricted])
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    uniform = total.new_tensor([_uniform(p.seed, step) for p, step in zip(params, steps, strict=True)])
    # Rounding up to the total would pick a token beyond the last possible one.
    target = torch.minimum(uniform.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _restrict(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Set to -inf all but each row's top_k likeliest tokens, and of those all but the fewest that make up top_p."""
    vocab = scaled.shape[1]
    top_k = torch.tensor([p.top_k if p.top_k > 0 else vocab for p in params], device=scaled.device)
    top_p = scaled.new_tensor([p.top_p for p in params]).unsqueeze(1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=scaled.device)
    ordered = ordered.masked_fill(ranks >= top_k.unsqueeze(1), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    likelier = probabilities.cumsum(dim=-1) - probabilities
    # The likeliest token always stays, whatever top_p is.
    ordered = ordered.masked_fill((likelier >= top_p) & (ranks > 0), float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def _uniform(seed: int | None, step: int) -> float:
    """A number in [0, 1): block `step` of the Philox stream that `seed` selects (Salmon et al., SC 2011)."""
    if seed is None:
        raise ValueError("a request with a temperature above 0 needs a seed")
    bits = int(np.random.Philox(key=seed & (2**64 - 1), counter=step).random_raw())
    return (bits >> 11) * 2.0**-53


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[Sampled]:
    logprobs = logits.log_softmax(dim=-1)
    chosen: list[float] = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist()
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    alternatives = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Sampled(token_id, logprob, list(zip(ids, values, strict=True))[:count])
        for token_id, logprob, (ids, values), count in zip(
            token_ids.tolist(), chosen, alternatives, counts, strict=True
        )
    ]
