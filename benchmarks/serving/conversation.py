"""Conversations: each turn sends all that was said before it, and more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from benchmarks.serving.workload import Prompt, RandomPrompts


@dataclass(frozen=True)
class Conversation:
    """The turns of one client, each with the tokens that are new in it."""

    turns: Sequence[Prompt]


@dataclass(frozen=True)
class Conversations:
    """Conversations of so many turns, all of which begin with the same `shared_prefix` tokens.

    prompts: the tokens that a turn adds, which are random, and those of its answer. What goes ahead has one turn.
    """

    prompts: RandomPrompts
    turns: int
    shared_prefix: int = 0

    def draw(self, point: int, count: int, ahead: int = 0) -> Iterator[Conversation]:
        drawn = self.prompts.draw(point, ahead + count * self.turns)
        shared = self._shared()
        for turns in [1] * ahead + [self.turns] * count:
            first, *others = islice(drawn, turns)
            yield Conversation([first.after(Prompt(shared, output_tokens=0)), *others])

    @property
    def longest(self) -> int:
        return self.shared_prefix + self.turns * self.prompts.longest

    def _shared(self) -> list[int]:
        """A stream of random numbers of its own: the same for all load points."""
        rng = np.random.default_rng((self.prompts.seed, 0, 1))
        ids: list[int] = rng.integers(0, self.prompts.vocab_size, self.shared_prefix).tolist()
        return ids
