"""Which part of a model's work one process does, and what processes exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch


@dataclass(frozen=True)
class Shard:
    """Process `rank` of the `world_size` processes that compute one model together.

    Experts are divided by expert and a chunk's tokens in contiguous blocks; all other weights are in every process.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"shard {self.rank} of {self.world_size}: expected a rank from 0 to {self.world_size - 1}")

    def experts(self, count: int) -> range:
        """The routed experts of a layer whose weights this process has. Raises ValueError if they do not divide."""
        if count % self.world_size:
            raise ValueError(f"{count} experts cannot be divided among {self.world_size} processes")
        share = count // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def tokens(self, count: int) -> range:
        """The tokens of a chunk that this process computes: blocks that differ by at most one token."""
        return range(self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size)

    def most_tokens(self, count: int) -> int:
        """The tokens of a chunk that any of the processes computes at most; at least one."""
        return max(1, -(-count // self.world_size))

    def blocks(self, lengths: Sequence[int]) -> list[tuple[int, range]]:
        """This process's tokens of several chunks, one behind the other: which chunk, and which of its tokens."""
        own = self.tokens(sum(lengths))
        found = []
        for number, (begin, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
            if tokens := range(max(own.start, begin) - begin, min(own.stop, end) - begin):
                found.append((number, tokens))
        return found


SINGLE_RANK = Shard()
"""One process computes everything."""


class Exchange(Protocol):
    """What the processes of a group exchange around a mixture of experts, of which each has some."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """A row for each of all processes' tokens, [M, width], of those of this process's, [N, width], of any dtype:
        hidden states, or what `RoutedTokens` are packed in."""

    def own(self, count: int) -> range:
        """Which of the M are this process's `count` tokens."""

    def reduce(self, parts: torch.Tensor) -> torch.Tensor:
        """What all processes contribute to this process's tokens, [N, hidden_size], of what each computed, [M,
        hidden_size]."""


class NoExchange:
    """One process has all tokens and all experts."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def own(self, count: int) -> range:
        return range(count)

    def reduce(self, parts: torch.Tensor) -> torch.Tensor:
        return parts


NO_EXCHANGE: Exchange = NoExchange()
