"""`python -m benchmarks.swap_in.published`: selections that miss as those of a large model do, and how they miss.

Published for GLM-5.1 on LongBench v2 with k = 2048: LRU buffers of k, 2k and 4k slots miss 30.0, 13.4 and 6.7% of what
a token selects; of 2k slots FIFO misses 17.2% and Belady's optimum 8.2%.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.documents import check_writable
from benchmarks.program import run
from benchmarks.swap_in.eviction import Policy, Trace, play_clock, play_fifo, play_lru, play_optimum
from benchmarks.tables import table

LRU_MISSES = (0.300, 0.134, 0.067)
"""Of what a token selects, with k, 2k and 4k slots."""
_FIFO_MISSES, _OPTIMUM_MISSES = 0.172, 0.082
_SETTLING_STEPS = 60
"""After which FIFO's buffer, too, has what it always has."""


class StackSelections:
    """Selections of several sequences, by depth in their LRU stacks (Mattson et al., "Evaluation techniques for storage
    hierarchies", IBM Systems Journal, 1970).

    A stack has all positions before the newest, those that were selected last on top. A token selects itself, and from
    each range of depths 0 .. k, k .. 2k, 2k .. 4k, 4k .. 8k and so on the number of positions that gives an LRU buffer
    of as many slots the misses `LRU_MISSES`. From 4k on, twice the slots halve the misses. Within a range any position
    is as likely as any other. What is selected comes to the top in its order.

    misses: as `LRU_MISSES`, for k and each doubling. Raises StartupError for a context that is too short for them.
    """

    def __init__(
        self,
        sequences: int,
        top_k: int,
        context: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        misses: tuple[float, ...] = LRU_MISSES,
    ) -> None:
        self.top_k = top_k
        least = top_k << len(misses)
        if context < least:
            raise StartupError(f"selections with these misses need {least} tokens, found {context}")
        self._generator = torch.Generator(device).manual_seed(seed)
        self._stack = self._random(sequences, context, device).argsort(dim=1).int()
        self._ranges: list[tuple[int, int | None, int]] = []
        """Where each begins and ends, and how many are selected from it."""
        left, start = top_k - 1, 0
        for miss_rate in _halved(misses):
            end = top_k << len(self._ranges)
            if 2 * end > context:
                break
            missed = round(miss_rate * top_k)
            self._ranges.append((start, end, left - missed))
            left, start = missed, end
        self._ranges.append((start, None, left))

    def next(self, newest: int) -> torch.Tensor:
        """What the token at position `newest` selects, itself first: int32 [sequences, top_k], distinct."""
        sequences, length = self._stack.shape
        selected = torch.zeros_like(self._stack, dtype=torch.bool)
        for start, end, count in self._ranges:
            drawn = self._random(sequences, (end or length) - start, self._stack.device).topk(count, sorted=False)
            selected.scatter_(1, start + drawn.indices, True)
        itself = self._stack.new_full((sequences, 1), newest)
        top, below = (self._stack[of].view(sequences, -1) for of in (selected, ~selected))
        self._stack = torch.cat([itself, top, below], dim=1)
        return self._stack[:, : self.top_k]

    def history(self, hot_size: int) -> Iterator[torch.Tensor]:
        """Selections that leave the top of the stack in an empty LRU buffer of `hot_size` slots, as `next` returns."""
        for part in reversed(range(min(-(-hot_size // self.top_k), self._stack.shape[1] // self.top_k))):
            yield self._stack[:, part * self.top_k : (part + 1) * self.top_k]

    def _random(self, sequences: int, count: int, device: torch.device | str) -> torch.Tensor:
        return torch.rand((sequences, count), generator=self._generator, device=device)


def _halved(misses: tuple[float, ...]) -> Iterator[float]:
    """These, and then each half of the one before."""
    yield from misses
    last = misses[-1]
    while True:
        yield (last := last / 2)


def make_trace(top_k: int, context: int, steps: int, seed: int = 0) -> tuple[Trace, int]:
    """A trace of one sequence, and its first step after the history of a buffer of 4k slots."""
    selections = StackSelections(1, top_k, context, seed)
    made = list(selections.history(4 * top_k))
    first = len(made)
    made += [selections.next(context + step) for step in range(first, first + steps)]
    return torch.cat(made).numpy().astype(np.int64), first


def main(
    top_k: Annotated[int, typer.Option(min=16)] = 2048,
    context_length: Annotated[int, typer.Option(min=1, help="Tokens at the first step.")] = 32768,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are counted.")] = 200,
    seed: int = 0,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the trace, as benchmarks.swap_in.record does.")
    ] = None,
) -> None:
    """Make selections, play them against each policy, and print what it misses beside what is published."""
    if out is not None:
        check_writable(out)
    trace, first = make_trace(top_k, context_length, _SETTLING_STEPS + steps, seed)
    since = first + _SETTLING_STEPS
    shown = table("policy", "hot slots", "misses % of k", "published", words=("policy",))
    cases: list[tuple[Policy, str, int, float | None]] = [
        *((play_lru, "LRU", 1 << doubled, misses) for doubled, misses in enumerate(LRU_MISSES)),
        (play_fifo, "FIFO", 2, _FIFO_MISSES),
        (play_optimum, "optimum", 2, _OPTIMUM_MISSES),
        *((play_clock, "ours", size, None) for size in (1, 2, 4)),
    ]
    for play, policy, size, published in cases:
        missed = 1 - play(trace, context_length, size * top_k, since)
        shown.add_row(policy, f"{size}k", f"{100 * missed:.1f}", f"{100 * published:.1f}" if published else "")
    Console().print(shown)
    if out is not None:
        np.savez_compressed(out, positions=trace.astype(np.int32), first=context_length)


if __name__ == "__main__":
    run(main)
