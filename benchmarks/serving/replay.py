"""A trace as prompts: made-up tokens that are equal exactly where the trace says that they were."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from base.block_hashes import BLOCK_TOKENS
from base.errors import StartupError
from benchmarks.prefix.trace import TRACE_BLOCK_TOKENS, TracedPrompt, load_trace
from benchmarks.serving.load import Scheduled
from benchmarks.serving.workload import Prompt, RandomPrompts

_AHEAD_OUTPUT = 4


@dataclass(frozen=True)
class Scale:
    """How a trace becomes smaller than it was.

    block_tokens: tokens for a block of 512; prompts and answers become shorter by the same factor. max_output: answers
    end after so many tokens. max_input: tokens of the longest prompt; context: of the longest prompt and its answer;
    longer ones are left out. They are not cut: of a long conversation equal prompts would remain, which the trace does
    not have. None: no limit.
    """

    block_tokens: int = TRACE_BLOCK_TOKENS
    max_output: int | None = None
    max_input: int | None = None
    context: int | None = None

    def input_tokens(self, traced: TracedPrompt) -> int:
        return -(-traced.input_length * self.block_tokens // TRACE_BLOCK_TOKENS)

    def output_tokens(self, traced: TracedPrompt) -> int:
        scaled = max(1, round(traced.output_length * self.block_tokens / TRACE_BLOCK_TOKENS))
        return scaled if self.max_output is None else min(scaled, self.max_output)

    def fits(self, traced: TracedPrompt) -> bool:
        tokens = self.input_tokens(traced)
        fits_input = self.max_input is None or tokens <= self.max_input
        return fits_input and (self.context is None or tokens + self.output_tokens(traced) <= self.context)


@dataclass(frozen=True)
class TraceReplay:
    """The requests of a trace in their order, all of which fit. left_out: those before the last that do not.

    A block's tokens are drawn, below `vocab_size`, from a stream of random numbers that its hash id alone decides.
    """

    traced: Sequence[TracedPrompt]
    scale: Scale
    vocab_size: int
    left_out: int = 0
    seed: int = 0

    def draw(self, point: int, count: int, ahead: int = 0) -> Iterator[Prompt]:
        """Ahead go random prompts of a block, which share nothing with the trace."""
        others = RandomPrompts(self.scale.block_tokens, _AHEAD_OUTPUT, vocab_size=self.vocab_size, seed=self.seed)
        yield from others.draw(point, ahead)
        for traced in self.traced[:count]:
            yield Prompt(self._tokens(traced), self.scale.output_tokens(traced))

    @cached_property
    def longest(self) -> int:
        scale = self.scale
        return max(scale.input_tokens(traced) + scale.output_tokens(traced) for traced in self.traced)

    def schedule(self, speed: float) -> Scheduled:
        """When each request is sent, so many times as fast as it was recorded."""
        first = self.traced[0].timestamp
        return Scheduled(tuple((traced.timestamp - first) / 1e3 / speed for traced in self.traced), speed)

    def _tokens(self, traced: TracedPrompt) -> list[int]:
        blocks = [self._block(int(hash_id)) for hash_id in traced.hash_ids]
        return [token for block in blocks for token in block][: self.scale.input_tokens(traced)]

    def _block(self, hash_id: int) -> list[int]:
        # Three numbers, where load points have two: no stream of one is a stream of the other.
        rng = np.random.default_rng((self.seed, hash_id, 2))
        ids: list[int] = rng.integers(0, self.vocab_size, self.scale.block_tokens).tolist()
        return ids


def read_replay(path: Path, limit: int | None, scale: Scale, vocab_size: int, seed: int) -> TraceReplay:
    """The first `limit` requests of a trace that fit.

    Raises StartupError for what is no trace, if no request fits, and for blocks that a cache does not keep whole.
    """
    try:
        traced = sorted(load_trace(path), key=lambda one: one.timestamp)
    except OSError as error:
        raise StartupError(f"--trace {path}: {error}") from error
    if scale.block_tokens % BLOCK_TOKENS:
        raise StartupError(f"--block-tokens {scale.block_tokens}: expected a multiple of {BLOCK_TOKENS}")
    wanted: list[TracedPrompt] = []
    left_out = 0
    for one in traced:
        if limit is not None and len(wanted) == limit:
            break
        if scale.fits(one):
            wanted.append(one)
        else:
            left_out += 1
    if not wanted:
        shortest = min(map(scale.input_tokens, traced))
        raise StartupError(f"--trace {path}: no request fits; the shortest prompt has {shortest} tokens")
    return TraceReplay(wanted, scale, vocab_size, left_out, seed)
