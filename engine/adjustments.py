"""Changes logits before a token is drawn: penalties, biases, and tokens that may not come.

A batch is changed as a whole, each request by its own settings; neutral settings change no bit. The order is vLLM's:
biases and bans, then penalties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from base.device import upload
from control.messages import Sampling

_NEVER = float("-inf")
_TokenIds = npt.NDArray[np.int64]
_NONE: _TokenIds = np.array((), np.int64)


@dataclass(frozen=True, eq=False)
class Ban:
    """Tokens that may not come at one place of a step. entry: b * width + j for token j of request b. token_ids: int64
    [n]."""

    entry: int
    token_ids: _TokenIds


def adjusts(sampling: Sampling) -> bool:
    """Whether a request's logits are changed before its tokens are drawn."""
    penalised = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0 or sampling.repetition_penalty != 1
    biased = bool(sampling.logit_bias) or sampling.allowed_token_ids is not None
    return penalised or biased or bool(sampling.bad_words) or sampling.min_tokens > 0


class BannedTokens:
    """Tokens that may not come next in one request, in addition to those that never may (see `LogitAdjustments`).

    Bad words are indexed once, by their tokens before the last. A step looks up the end of the answer once for each
    length of these prefixes. k lengths take at least k (k + 3) / 2 tokens, so MAX_BAD_WORD_TOKENS bounds k by 89.
    """

    def __init__(self, sampling: Sampling, stop_token_ids: Sequence[int]) -> None:
        self._min_tokens = sampling.min_tokens
        self._stops = np.array(stop_token_ids, np.int64)
        last_tokens: dict[tuple[int, ...], list[int]] = {}
        lengths: dict[int, set[int]] = {}
        for *prefix, last in sampling.bad_words:
            if prefix:
                last_tokens.setdefault(tuple(prefix), []).append(last)
                lengths.setdefault(prefix[-1], set()).add(len(prefix))
        self._last_tokens = {prefix: np.array(found, np.int64) for prefix, found in last_tokens.items()}
        self._lengths = {token_id: sorted(found) for token_id, found in lengths.items()}
        """The lengths of prefixes, by the token at their end."""

    def after(self, generated: Sequence[int], drafts: Sequence[int] = ()) -> _TokenIds:
        """Tokens that may not follow the generated ones and these drafts, int64 [n], repetitions included."""
        total = len(generated) + len(drafts)
        banned = [self._stops] if total < self._min_tokens else []
        newest = drafts[-1:] or generated[-1:]
        for length in self._lengths.get(newest[0], ()) if total else ():
            end = (*generated[len(generated) - max(0, length - len(drafts)) :], *drafts[-length:])
            if length <= total and (found := self._last_tokens.get(end)) is not None:
                banned.append(found)
        return np.concatenate(banned) if banned else _NONE


class LogitAdjustments:
    """What is added to the logits of running requests, and how often they got each token; on the device, by row.

    The tables take 9 bytes per row and token of the vocabulary (74 MB for 64 rows of 129,280). The first request that
    needs them makes them.
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

    def apply(
        self, logits: torch.Tensor, rows: torch.Tensor, bans: Sequence[Ban], drafts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A changed copy of logits, float32 [batch * width, vocab]; -inf for a token that may not come.

        Only for a batch with a request that `adjusts`. rows: int64 [batch] on the device. drafts: int64 [batch, width -
        1], of each request, which its places after the first follow; None if the width is 1.
        """
        tables = self._tables
        assert tables is not None, "a request that needs it was admitted"
        width = len(logits) // len(rows)
        counts = tables.counts[rows].repeat_interleave(width, 0)
        for place in range(1, width):
            assert drafts is not None, "of every place after the first"
            # All places from this one on follow this draft.
            draft = drafts[:, place - 1, None, None].expand(-1, width - place, 1)
            by_place = counts.view(len(rows), width, -1)[:, place:]
            by_place.scatter_add_(2, draft, torch.ones_like(draft, dtype=counts.dtype))
        rows = rows.repeat_interleave(width)
        changed = logits + tables.bias[rows]
        if bans:
            entries = np.repeat([ban.entry for ban in bans], [len(ban.token_ids) for ban in bans])
            token_ids = np.concatenate([ban.token_ids for ban in bans])
            entry, token_id = self._uploaded([entries, token_ids])
            changed[entry, token_id] = _NEVER
        frequency, presence, repetition = tables.penalties[rows].float().T.unsqueeze(2)
        came = counts > 0
        repeated = came | tables.in_prompt[rows]
        changed = torch.where(repeated, torch.where(changed > 0, changed / repetition, changed * repetition), changed)
        changed -= frequency * counts
        return changed.sub_(presence * came)

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Note drawn tokens, int64 [n], of a batch with a request that `adjusts`; ids below 0 are no tokens."""
        assert self._tables is not None, "a request that needs it was admitted"
        came = (token_ids >= 0).to(torch.int32)
        self._tables.counts.index_put_((rows, token_ids.clamp(min=0)), came, accumulate=True)

    def _fill(
        self, tables: "_Tables", row: int, sampling: Sampling, prompt_ids: Sequence[int], generated: Sequence[int]
    ) -> None:
        if sampling.allowed_token_ids is not None:
            tables.bias[row].fill_(_NEVER)
            tables.bias[row, self._uploaded(sampling.allowed_token_ids)] = 0.0
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
