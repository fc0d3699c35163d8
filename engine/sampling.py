"""Picks the next token of each request from its logits.

Randomness is counter-based: the i-th token of a request depends only on its seed, i and its logits, whatever its node
and batch. Tokens are drawn by adding Gumbel noise to their logits: for the same random number a slightly different
distribution, such as a draft's, mostly gives the same token. Nothing here waits for a device. Logits are float32. Sums
over them are float64: the order in which a device adds depends on the batch, and must not change a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from control.messages import Sampling, Token
from engine.adjustments import adjusts
from engine.grammar.masks import few_allowed, masked
from kernels.operands import Threshold
from kernels.ops import ops_on

T = TypeVar("T")

_NUMBERS_AHEAD = 64


class NoToken(Enum):
    """Why a request got no token. The value is the token id of such a row."""

    NOT_FINITE = -1
    NOTHING_ALLOWED = -2

    def __str__(self) -> str:
        if self is NoToken.NOT_FINITE:
            return "the logits to draw from are not finite numbers"
        return (
            "what the request allows (by the structure of its answer, allowed_token_ids, bad_words, min_tokens) leaves "
            "no token to choose"
        )


@dataclass(frozen=True)
class SamplingNeeds:
    """What some request of a batch needs. random: temperature above 0. restricted: top_k or top_p. floored: min_p.
    adjusted: changed logits (`engine.adjustments`). top_logprobs: the most alternatives that a request reports;
    None: no request reports log probabilities."""

    random: bool
    restricted: bool
    floored: bool
    adjusted: bool
    top_logprobs: int | None

    @classmethod
    def of(cls, requests: Sequence[Sampling]) -> "SamplingNeeds":
        drawn = [sampling for sampling in requests if sampling.temperature > 0]
        reported = [sampling.top_logprobs for sampling in requests if sampling.top_logprobs is not None]
        return cls(
            random=bool(drawn),
            restricted=any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in drawn),
            floored=any(sampling.min_p > 0 for sampling in drawn),
            adjusted=any(map(adjusts, requests)),
            top_logprobs=max(reported, default=None),
        )


class RandomStream:
    """A request's random numbers: blocks of the Philox stream that its seed selects (Salmon et al., SC 2011)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._keys = np.empty(0, dtype=np.int64)

    def keys(self, index: int, count: int) -> npt.NDArray[np.int64]:
        """The random numbers of `count` tokens from `index` on, int64."""
        begin = index - self._first
        if not 0 <= begin <= len(self._keys) - count:
            # A block has four words; the first of each is used.
            words = np.random.Philox(key=self._seed, counter=index).random_raw(4 * (_NUMBERS_AHEAD + count))[::4]
            self._first, begin, self._keys = index, 0, words.view(np.int64)
        return self._keys[begin : begin + count]


class Settings(NamedTuple, Generic[T]):
    """How tokens are drawn, on the device a column for each field. temperature: 0 is greedy. top_k: at least 1."""

    temperature: T
    top_p: T
    top_k: T
    log_min_p: T


def settings_of(sampling: Sampling, vocab_size: int) -> Settings[float]:
    """The settings of a request."""
    return Settings(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size,
        log_min_p=math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
    )


def draw(
    logits: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    needs: SamplingNeeds,
    changed: torch.Tensor,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queue the sampling of a batch on the logits' device.

    logits: float32 [n, vocab], of the model, which are reported. changed: the logits that tokens are drawn from, -inf
    for tokens that may not come. settings: float64 [fields of Settings, n]. keys: int64 [n], of `RandomStream`. masks:
    int32 [n, ceil(vocab / 32)] in host memory (`engine.grammar.masks`); None: all tokens may come. Returns float64
    [n, 1 + (0 or 1 + 2 k)], which `tokens_of` reads: the token, or a NoToken; if any request reports log probabilities,
    the token's, those of the k likeliest tokens, and these tokens. A token is always one of the vocabulary.
    """
    if logits.device.type == "cpu":
        token_ids = _choose_by_rows(changed, settings, keys, needs, masks)
    else:
        token_ids = _choose(changed if masks is None else masked(changed, masks), settings, keys, needs)
    # Last, because NaN makes every comparison meaningless. Both extremes are NaN where any logit is: `isfinite` of all
    # takes a processor twenty times as long.
    finite = logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()
    if changed is not logits:
        # Before masks, which hide NaN on some devices. -inf is a token that may not come.
        finite &= changed.amax(dim=-1) < math.inf
    token_ids = token_ids.masked_fill(~finite, NoToken.NOT_FINITE.value)
    columns = [token_ids.unsqueeze(1)]
    if needs.top_logprobs is not None:
        columns += _logprobs(logits, token_ids, needs.top_logprobs)
    return torch.cat([column.double() for column in columns], dim=1)


def _choose(
    changed: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    needs: SamplingNeeds,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The number of the token of each row, int64 [n], or NOTHING_ALLOWED. Arguments as in `draw`. tokens: see
    `Ops.perturb`. If logits are not finite, it is any token of the vocabulary."""
    scores, likeliest = changed, changed.amax(dim=-1)
    if needs.random:
        temperature, top_p, top_k, log_min_p = Settings(*settings.unsqueeze(2))
        # Relative to the maximum, so that a tiny temperature cannot overflow. A greedy row keeps nothing but that.
        divisor = temperature.float().clamp(min=torch.finfo(torch.float32).tiny)
        scores = (changed - likeliest.unsqueeze(1)) / divisor
        if needs.floored:
            scores = scores.masked_fill(scores < log_min_p, float("-inf"))
        ops = ops_on(scores.device)
        if needs.restricted:
            scores = _restrict(scores, ops.find_threshold(scores, top_k, top_p))
        scores = ops.perturb(scores, temperature.squeeze(1).sign().float(), keys, tokens)
    return scores.argmax(dim=-1).masked_fill(likeliest == float("-inf"), NoToken.NOTHING_ALLOWED.value)


def _choose_by_rows(
    changed: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    needs: SamplingNeeds,
    masks: torch.Tensor | None,
) -> torch.Tensor:
    """`_choose` on a processor, with masks: as many rows at a time as there are threads, so that rows stay in caches.
    If a mask allows few tokens, one is chosen among these alone, which gives the same token."""
    count, vocab = changed.shape
    token_ids = torch.empty(count, dtype=torch.int64)
    few = {} if masks is None else few_allowed(masks, vocab)
    for row, allowed in few.items():
        if len(allowed):
            among = changed[row].index_select(0, allowed).unsqueeze(0)
            chosen = _choose(among, settings[:, [row]], keys[[row]], needs, allowed)
            token_ids[row] = torch.where(chosen < 0, chosen, allowed[chosen.clamp(min=0)])
        else:
            token_ids[row] = NoToken.NOTHING_ALLOWED.value
    others = [row for row in range(count) if row not in few]
    together = max(torch.get_num_threads(), _CACHED_LOGITS // vocab)
    for begin in range(0, len(others), together):
        rows = torch.tensor(others[begin : begin + together])
        part = changed.index_select(0, rows)
        if masks is not None:
            part = masked(part, masks[rows])
        token_ids[rows] = _choose(part, settings[:, rows], keys[rows], needs)
    return token_ids


_CACHED_LOGITS = 2**17
"""So many at least are chosen from at a time: an operation on few takes as long as one on them."""


def tokens_of(drawn: torch.Tensor, requests: Sequence[Sampling]) -> list[Token | NoToken]:
    """The tokens that `draw` returned, on the host by now. requests: the one of each token."""
    return [_token(row, sampling.top_logprobs) for row, sampling in zip(drawn.tolist(), requests, strict=True)]


def _restrict(scaled: torch.Tensor, threshold: Threshold) -> torch.Tensor:
    """Set to -inf the logits below the threshold, and those equal to it except the first `threshold.equals` of them."""
    equal = scaled == threshold.least
    keep = (scaled > threshold.least) | (equal & (equal.cumsum(dim=-1) <= threshold.equals))
    return scaled.masked_fill(~keep, float("-inf"))


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Log probabilities of the tokens [n, 1], and of the `count` likeliest, with those tokens, [n, count]: those of the
    model, before temperature, top-k and top-p."""
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    best = logits.topk(min(count, logits.shape[1]), dim=-1)
    chosen = logits.gather(1, token_ids.clamp(min=0).unsqueeze(1))
    return [chosen - log_total, best.values - log_total, best.indices]


def _token(row: list[float], top_logprobs: int | None) -> Token | NoToken:
    token_id = int(row[0])
    if token_id < 0:
        return NoToken(token_id)
    if top_logprobs is None:
        return Token(token_id=token_id)
    most = (len(row) - 2) // 2
    alternatives = tuple(zip(map(int, row[2 + most :]), row[2 : 2 + most], strict=True))[:top_logprobs]
    return Token(token_id=token_id, logprob=row[1], top_logprobs=alternatives)
