"""Which part of a model's work one process does, and what processes exchange."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from kernels.fp8 import FP8, blocks

_ROW_MULTIPLE = 128
"""Rows are a multiple of so many bytes, so that each begins with a cache line and what is in it is aligned."""
_NUMBER_BYTES = 4
"""Of a scale, of an id and of a weight."""


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


class Exchange:
    """What the processes of a group exchange around a mixture of experts, of which each has some.

    The methods here are those of a process that has all tokens and all experts.
    """

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """A row for each of all processes' tokens, [M, width], of those of this process's, [N, width], of any dtype:
        hidden states, or what `RoutedTokens` are packed in."""
        return rows

    def own(self, count: int) -> range:
        """Which of the M are this process's `count` tokens."""
        return range(count)

    def reduce(self, parts: torch.Tensor) -> torch.Tensor:
        """What all processes contribute to this process's tokens, [N, hidden_size], of what each computed, [M,
        hidden_size]."""
        return parts


NO_EXCHANGE = Exchange()


@dataclass(frozen=True)
class RoutedTokens:
    """All that experts need of N tokens: their hidden states in block-fp8, and which experts compute them.

    rows: uint8 [N, row_bytes]. Of each token one after the other: values, scales, ids and weights, which are properties
    here, views of these bytes. So kernels write them where one collective takes them from.
    hidden_size: a multiple of 4; kernels ask for one of 16.
    """

    rows: torch.Tensor
    hidden_size: int
    top_k: int

    @classmethod
    def empty(cls, count: int, hidden_size: int, top_k: int, device: torch.device) -> "RoutedTokens":
        """Room for `count` tokens."""
        used = hidden_size + _NUMBER_BYTES * (blocks(hidden_size) + 2 * top_k)
        row_bytes = -(-used // _ROW_MULTIPLE) * _ROW_MULTIPLE
        return cls(torch.empty(count, row_bytes, dtype=torch.uint8, device=device), hidden_size, top_k)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, tokens: slice) -> "RoutedTokens":
        """Some of the tokens, in the same memory."""
        return replace(self, rows=self.rows[tokens])

    def gathered(self, exchange: Exchange) -> "RoutedTokens":
        """The tokens of all processes, of this process's."""
        return replace(self, rows=exchange.gather(self.rows))

    @property
    def values(self) -> torch.Tensor:
        """float8_e4m3fn [N, hidden_size], of strides (row_bytes, 1)."""
        return self.rows[:, : self.hidden_size].view(FP8)

    @property
    def scales(self) -> torch.Tensor:
        """float32 [N, ceil(hidden_size / 128)] of the values, as `kernels.fp8.quantise_activations` says."""
        return self._numbers(0, blocks(self.hidden_size), torch.float32)

    @property
    def ids(self) -> torch.Tensor:
        """int32 [N, top_k], as `Router.route` says."""
        return self._numbers(blocks(self.hidden_size), self.top_k, torch.int32)

    @property
    def weights(self) -> torch.Tensor:
        """float32 [N, top_k], as `Router.route` says."""
        return self._numbers(blocks(self.hidden_size) + self.top_k, self.top_k, torch.float32)

    @property
    def quantised(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales."""
        return self.values, self.scales

    @property
    def choice(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids."""
        return self.weights, self.ids

    def _numbers(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Some of the numbers of four bytes that stand behind the values; strides (row_bytes / 4, 1)."""
        begin = self.hidden_size + _NUMBER_BYTES * first
        return self.rows[:, begin : begin + _NUMBER_BYTES * count].view(dtype)
