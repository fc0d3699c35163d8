"""The token masks of a step."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from llguidance import LLExecutor

from engine.grammar.errors import GrammarViolation
from engine.grammar.state import GrammarState

MAX_THREADS = 8


@dataclass(frozen=True)
class Masks:
    """words: int32 [n, words] in pinned memory, bit i of word i // 32 allows token i; None: no request is constrained.
    It is the writer's, and valid until its next call. failed: why requests cannot go on, by their index in the batch;
    their rows allow everything."""

    words: torch.Tensor | None
    failed: dict[int, str]


class MaskWriter:
    """Fills the masks of a batch on the CPU, while the device computes the forward pass.

    It reuses one buffer: the copy of the masks of one step must be over before the masks of the next are written. It
    is, where a step's tokens are collected before the next step's are sampled (`Stepper`). One thread uses it.
    """

    def __init__(self, max_running: int, words: int, pinned: bool, threads: int | None = None) -> None:
        """words: of a mask (`Vocabulary.words`). pinned: for a CUDA device. threads: default: half of the cores."""
        self._words = torch.full((max_running, words), -1, dtype=torch.int32, pin_memory=pinned)
        self._rows = self._words.numpy()
        self._free = [True] * max_running
        """Which rows are all ones."""
        cores = len(os.sched_getaffinity(0))
        threads = threads or max(1, min(MAX_THREADS, cores // 2))
        # One thread that is not the caller's saves nothing and costs two switches.
        self._executor = LLExecutor(threads) if threads > 1 else None

    def write(self, states: Sequence[GrammarState | None]) -> Masks:
        """The masks of a batch. None stands for a request without a grammar, whose row is all ones."""
        constrained = [(index, state) for index, state in enumerate(states) if state is not None]
        if not constrained:
            return Masks(None, {})
        for index, state in enumerate(states):
            if state is None and not self._free[index]:
                self._rows[index] = -1
            self._free[index] = state is None
        begin, stride = self._rows.ctypes.data, self._rows.strides[0]
        if self._executor is None:
            for index, state in constrained:
                state.matcher.unsafe_compute_mask_ptr(begin + index * stride, stride)
        else:
            matchers = [(state.matcher, index) for index, state in constrained]
            self._executor.unsafe_compute_mask_ptr(matchers, begin, stride, len(states))
        failed = {}
        for index, state in constrained:
            try:
                state.complete(self._rows[index])
            except GrammarViolation as violation:
                failed[index] = str(violation)
        return Masks(self._words[: len(states)], failed)
