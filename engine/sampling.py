"""Picks the next token of each request from its logits.

Randomness is counter-based: the i-th token of a request depends only on its seed, on i and on its logits. So a request
keeps its random stream when it changes its node or its batch.

Nothing here waits for a device. Logits stay float32. Sums over them are float64: the order in which a device adds
depends on the batch, and must not change a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from control.messages import Sampling, Token
from engine.thresholds import Threshold, find_threshold

NOT_FINITE = -1
"""The token id of a row whose logits are not all finite numbers."""
_NUMBERS_AHEAD = 64


@dataclass(frozen=True)
class SamplingNeeds:
    """What to compute for a batch. random: some request draws at random. restricted: with top_k or top_p. top_logprobs:
    the most alternatives that a request reports; None: no request reports log probabilities."""

    random: bool
    restricted: bool
    top_logprobs: int | None

    @classmethod
    def of(cls, requests: Sequence[Sampling]) -> "SamplingNeeds":
        drawn = [sampling for sampling in requests if sampling.temperature > 0]
        reported = [sampling.top_logprobs for sampling in requests if sampling.top_logprobs is not None]
        return cls(
            random=bool(drawn),
            restricted=any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in drawn),
            top_logprobs=max(reported, default=None),
        )


class RandomStream:
    """A request's random numbers: blocks of the Philox stream that its seed selects (Salmon et al., SC 2011)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._numbers: list[float] = []

    def number(self, index: int) -> float:
        """The random number in [0, 1) of token `index`."""
        if not 0 <= index - self._first < len(self._numbers):
            # A block has four words; the first of each is used.
            words = np.random.Philox(key=self._seed, counter=index).random_raw(4 * _NUMBERS_AHEAD)[::4]
            self._first, self._numbers = index, ((words >> np.uint64(11)) * 2.0**-53).tolist()
        return self._numbers[index - self._first]


def settings_of(sampling: Sampling, vocab_size: int) -> tuple[float, float, float]:
    """A request's sampling settings on the device: temperature (0 is greedy), top_p, top_k."""
    top_k = min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size
    return sampling.temperature, sampling.top_p, top_k


def draw(logits: torch.Tensor, settings: torch.Tensor, uniforms: torch.Tensor, needs: SamplingNeeds) -> torch.Tensor:
    """Queue the sampling of a batch on the logits' device.

    logits: float32 [n, vocab]. settings: float64 [3, n], the columns of `settings_of`. uniforms: float64 [n] in [0, 1).
    Returns float64 [n, 1 + (0 or 1 + 2 k)], which `tokens_of` reads: the token, or NOT_FINITE; where any request
    reports log probabilities, the token's, those of the k likeliest tokens, and these tokens.
    """
    token_ids = logits.argmax(dim=-1)
    if needs.random:
        temperature, top_p, top_k = settings.unsqueeze(2)
        # Relative to the maximum, so that a tiny temperature cannot overflow. Greedy rows are computed and not used.
        divisor = temperature.float().clamp(min=torch.finfo(torch.float32).tiny)
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / divisor
        if needs.restricted:
            scaled = _restrict(scaled, find_threshold(scaled, top_k, top_p))
        token_ids = torch.where(temperature.squeeze(1) > 0, _invert(scaled, uniforms.unsqueeze(1)), token_ids)
    # Last, because NaN makes every comparison above meaningless.
    token_ids = token_ids.masked_fill(~logits.isfinite().all(dim=-1), NOT_FINITE)
    columns = [token_ids.unsqueeze(1)]
    if needs.top_logprobs is not None:
        columns += _logprobs(logits, token_ids, needs.top_logprobs)
    return torch.cat([column.double() for column in columns], dim=1)


def tokens_of(drawn: torch.Tensor, requests: Sequence[Sampling]) -> list[Token | None]:
    """The tokens that `draw` returned, on the host by now; None where the logits were not finite numbers."""
    return [_token(row, sampling.top_logprobs) for row, sampling in zip(drawn.tolist(), requests, strict=True)]


def _restrict(scaled: torch.Tensor, threshold: Threshold) -> torch.Tensor:
    """Set to -inf the logits below the threshold, and those equal to it except the first `threshold.equals` of them."""
    equal = scaled == threshold.least
    keep = (scaled > threshold.least) | (equal & (equal.cumsum(dim=-1) <= threshold.equals))
    return scaled.masked_fill(~keep, float("-inf"))


def _invert(scaled: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling: the token at which the cumulative probability passes a uniform number.

    Tokens stay in the order of the vocabulary, so that rounding that swaps two equally likely tokens changes nothing.
    """
    cumulative = scaled.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding up to the total would pick a token beyond the last possible one.
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Log probabilities of the tokens [n, 1], and of the `count` likeliest, with those tokens, [n, count]: those of the
    model, before temperature, top-k and top-p."""
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    best = logits.topk(min(count, logits.shape[1]), dim=-1)
    chosen = logits.gather(1, token_ids.clamp(min=0).unsqueeze(1))
    return [chosen - log_total, best.values - log_total, best.indices]


def _token(row: list[float], top_logprobs: int | None) -> Token | None:
    token_id = int(row[0])
    if token_id == NOT_FINITE:
        return None
    if top_logprobs is None:
        return Token(token_id=token_id)
    most = (len(row) - 2) // 2
    alternatives = tuple(zip(map(int, row[2 + most :]), row[2 : 2 + most], strict=True))[:top_logprobs]
    return Token(token_id=token_id, logprob=row[1], top_logprobs=alternatives)
