"""Conversations: each turn sends all that was said before it, and more."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.serving.client import Endpoint, Failure, Outcome, Request
from benchmarks.serving.workload import Prompt, RandomPrompts, Session


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


@dataclass(frozen=True)
class Opening:
    """A session, and its first request, which is made before anything is timed."""

    request: Request
    session: Session


Send = Callable[[Request], Coroutine[Any, Any, Outcome]]


async def converse(endpoint: Endpoint, opening: Opening, send: Send) -> list[Outcome]:
    """Send one turn after the other, each behind all that was said. A turn that fails is the last one."""
    prompt, *others = opening.session.turns
    outcomes = [await send(opening.request)]
    for turn in others:
        last = outcomes[-1]
        if last.failure is None and not last.token_ids:
            failure = Failure("no token ids", "conversations need a service that heeds return_token_ids")
            outcomes[-1] = last = replace(last, failure=failure)
        if last.failure is not None:
            break
        prompt = turn.after(prompt, last.token_ids)
        outcomes.append(await send(endpoint.request(prompt)))
    return outcomes
