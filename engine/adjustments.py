"""Changes logits before a token is drawn: penalties, biases, and tokens that may not come.

All requests of a batch are changed together, each by its own settings; for a request without any nothing changes, to
the bit. The order is vLLM's: biases and bans, then penalties.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from control.messages import Sampling
from hisparse.device_pool import upload

_NEVER = float("-inf")


@dataclass(frozen=True)
class Ban:
    """One token that one request of a batch may not get in this step. entry: of the batch."""

    entry: int
    token_id: int


def adjusts(sampling: Sampling) -> bool:
    """Whether a request's logits are changed before its tokens are drawn."""
    penalised = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0 or sampling.repetition_penalty != 1
    biased = bool(sampling.logit_bias) or sampling.allowed_token_ids is not None
    return penalised or biased or bool(sampling.bad_words) or sampling.min_tokens > 0


def banned_tokens(sampling: Sampling, stop_token_ids: Collection[int], generated: Sequence[int]) -> set[int]:
    """Tokens that may not follow what a request has generated, beside those that never may (see `LogitAdjustments`)."""
    banned: set[int] = set()
    if len(generated) < sampling.min_tokens:
        banned.update(stop_token_ids)
    for *before, last in sampling.bad_words:
        if before and tuple(generated[-len(before) :]) == tuple(before):
            banned.add(last)
    return banned


class LogitAdjustments:
    """What is added to the logits of running requests, and how often they got each token; on the device, by row.

    The tables take 9 bytes per row and token of the vocabulary (74 MB for 64 rows of 129,280). They are made when the
    first request needs them, since most services never do.
    """

    def __init__(self, max_running: int, vocab_size: int, device: torch.device) -> None:
        self._shape = max_running, vocab_size
        self._device = device
        self._tables: _Tables | None = None
        self._in_use: set[int] = set()
        """Rows that change logits."""

    def admit(self, row: int, sampling: Sampling, prompt_ids: Sequence[int], generated: Sequence[int]) -> None:
        """Set up the row of a request that was just admitted, with the tokens that it has."""
        needed = adjusts(sampling)
        if not needed and row not in self._in_use:
            return
        if self._tables is None:
            self._tables = _Tables.new(*self._shape, self._device)
        tables = self._tables
        for table, neutral in ((tables.bias, 0), (tables.counts, 0), (tables.in_prompt, False)):
            table[row].fill_(neutral)
        penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
        upload(np.array(penalties), tables.penalties[row])
        self._in_use.discard(row)
        if needed:
            self._in_use.add(row)
            self._fill(tables, row, sampling, prompt_ids, generated)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, bans: Sequence[Ban]) -> torch.Tensor:
        """The changed logits, float32 [n, vocab], of `logits`, which stay; -inf for a token that may not come.

        For a batch of which some request needs it. rows: int64 [n] on the device, those of the batch's requests.
        """
        tables = self._tables
        assert tables is not None, "a request that needs it was admitted"
        changed = logits + tables.bias[rows]
        if bans:
            entries = self._uploaded([[ban.entry, ban.token_id] for ban in bans])
            changed[entries[:, 0], entries[:, 1]] = _NEVER
        frequency, presence, repetition = tables.penalties[rows].float().T.unsqueeze(2)
        counts = tables.counts[rows]
        came = counts > 0
        repeated = came | tables.in_prompt[rows]
        changed = torch.where(repeated, torch.where(changed > 0, changed / repetition, changed * repetition), changed)
        changed -= frequency * counts
        return changed.sub_(presence * came)

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Note the drawn tokens, int64 [n], of a batch of which some request needs it; ids below 0 are none."""
        assert self._tables is not None, "a request that needs it was admitted"
        came = (token_ids >= 0).to(torch.int32)
        self._tables.counts.index_put_((rows, token_ids.clamp(min=0)), came, accumulate=True)

    def _fill(
        self, tables: "_Tables", row: int, sampling: Sampling, prompt_ids: Sequence[int], generated: Sequence[int]
    ) -> None:
        if sampling.allowed_token_ids is not None:
            allowed = self._uploaded(sorted(set(sampling.allowed_token_ids)))
            tables.bias[row].fill_(_NEVER)
            tables.bias[row, allowed] = 0.0
        if sampling.logit_bias:
            ids, values = zip(*dict(sampling.logit_bias).items(), strict=True)
            tables.bias[row, self._uploaded(ids)] += self._uploaded(values, np.float32)
        if never := sorted({word[0] for word in sampling.bad_words if len(word) == 1}):
            tables.bias[row, self._uploaded(never)] = _NEVER
        if sampling.repetition_penalty != 1:
            tables.in_prompt[row, self._uploaded(np.unique(prompt_ids))] = True
        if generated:
            seen, counts = np.unique(generated, return_counts=True)
            tables.counts[row, self._uploaded(seen)] = self._uploaded(counts, np.int32)

    def _uploaded(self, values: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> torch.Tensor:
        array = np.asarray(values, dtype)
        target = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=self._device)
        upload(array, target)
        return target


@dataclass(frozen=True)
class _Tables:
    """By row. bias: float32 [rows, vocab]. counts: int32 [rows, vocab], of generated tokens. in_prompt: bool [rows,
    vocab]. penalties: float64 [rows, 3], frequency, presence and repetition."""

    bias: torch.Tensor
    counts: torch.Tensor
    in_prompt: torch.Tensor
    penalties: torch.Tensor

    @classmethod
    def new(cls, rows: int, vocab: int, device: torch.device) -> "_Tables":
        return cls(
            torch.zeros((rows, vocab), dtype=torch.float32, device=device),
            torch.zeros((rows, vocab), dtype=torch.int32, device=device),
            torch.zeros((rows, vocab), dtype=torch.bool, device=device),
            torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).repeat(rows, 1).to(device),
        )
