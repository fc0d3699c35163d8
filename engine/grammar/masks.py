"""The token masks of a step: the host fills them, and sampling applies them to logits.

A mask is int32 [ceil(vocab / 32)]: bit t % 32 of word t // 32 allows token t.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor

from engine.grammar import GrammarViolation
from engine.grammar.state import FollowedDrafts, GrammarState

MAX_THREADS = 8


@dataclass(frozen=True)
class Masks:
    """words: int32 [n * width, words], valid until the writer's next call; None: no request is constrained. failed: why
    requests cannot go on, by index in the batch; their rows allow everything."""

    words: torch.Tensor | None
    failed: dict[int, str]


class MaskWriter:
    """Fills the masks of a batch on the CPU, while the device computes the forward pass. One thread uses it.

    It reuses one buffer: a step must be collected before the masks of the next are written (`Stepper` does).
    """

    def __init__(self, max_masks: int, words: int, pinned: bool, threads: int | None = None) -> None:
        """words: of a mask (`Vocabulary.words`). pinned: for a CUDA device. threads: default: half of the cores."""
        self._words = torch.full((max_masks, words), -1, dtype=torch.int32, pin_memory=pinned)
        self._rows = self._words.numpy()
        self._free = [True] * max_masks
        """Which rows are all ones."""
        cores = len(os.sched_getaffinity(0))
        threads = threads or max(1, min(MAX_THREADS, cores // 2))
        # One thread that is not the caller's saves nothing and costs two switches.
        self._executor = LLExecutor(threads) if threads > 1 else None

    def write(
        self, states: Sequence[GrammarState | None], drafts: Sequence[Sequence[int]] = (), width: int = 1
    ) -> Masks:
        """The masks of a batch, `width` for each request. None: a request without a grammar, whose rows are all ones.

        drafts: of each request, up to width - 1. The j-th mask is of the token after the first j drafts; it is all ones
        if these do not fit the grammar, or end the request. Raises ValueError for more than `max_masks`.
        """
        if len(states) * width > len(self._rows):
            raise ValueError(f"room for {len(self._rows)} masks, found {len(states)} requests x {width}")
        followed = {
            index: FollowedDrafts(state, drafts[index] if drafts else ())
            for index, state in enumerate(states)
            if state is not None
        }
        if not followed:
            return Masks(None, {})
        failed: dict[int, str] = {}
        for place in range(width):
            rows = {index * width + place: one.state for index, one in followed.items() if one.follow(place)}
            self._fill(rows, len(states) * width)
            for row, state in rows.items():
                try:
                    state.complete(self._rows[row])
                except GrammarViolation as violation:
                    if not place:
                        failed[row // width] = str(violation)
            self._clear(row for row in range(place, len(states) * width, width) if row not in rows)
        for index, one in followed.items():
            try:
                one.go_back()
            except GrammarViolation as violation:
                failed[index] = str(violation)
        return Masks(self._words[: len(states) * width], failed)

    def _fill(self, states: Mapping[int, GrammarState], rows: int) -> None:
        begin, stride = self._rows.ctypes.data, self._rows.strides[0]
        if self._executor is None or len(states) < 2:  # the library's threads take none as an error
            for row, state in states.items():
                state.matcher.unsafe_compute_mask_ptr(begin + row * stride, stride)
        else:
            matchers = [(state.matcher, row) for row, state in states.items()]
            self._executor.unsafe_compute_mask_ptr(matchers, begin, stride, rows)
        for row in states:
            self._free[row] = False

    def _clear(self, rows: Iterable[int]) -> None:
        """Have rows allow all tokens."""
        for row in rows:
            if not self._free[row]:
                self._rows[row] = -1
                self._free[row] = True


def masked(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """A copy of logits, float32 [n, vocab], with -inf for tokens that masks do not allow.

    masks: int32 [n, ceil(vocab / 32)] in host memory, pinned if the logits are on another device.
    """
    if logits.device.type != "cpu":
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        words = masks.to(logits.device, non_blocking=True).unsqueeze(-1)
        allowed = (words.bitwise_right_shift(bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
        return logits.masked_fill(~allowed, float("-inf"))
    # Eight tokens at a time, and without branches: three times as fast as the above on a processor.
    addends = np.take(_ADDENDS, masks.numpy().view(np.uint8), axis=0).reshape(len(masks), -1)
    return torch.from_numpy(addends[:, : logits.shape[1]]).add_(logits)


_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float32(0), np.float32("-inf")
)
"""What a byte of a mask adds to the logits of its eight tokens, float32 [256, 8]."""


def few_allowed(masks: torch.Tensor, vocab: int) -> dict[int, torch.Tensor]:
    """The tokens that masks in host memory allow, int64 and ascending, by row; only of rows that allow at most five
    eighths of the vocabulary: from there on, finding them costs more than they save."""
    words = masks.numpy().view(np.uint32)
    counts = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    return {int(row): torch.from_numpy(_allowed(words[row], vocab)) for row in np.flatnonzero(8 * counts <= 5 * vocab)}


def _allowed(words: npt.NDArray[np.generic], vocab: int) -> npt.NDArray[np.int64]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab)
    return np.flatnonzero(bits.view(np.bool_))
