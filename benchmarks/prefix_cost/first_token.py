"""Time to first token of a prompt of which much is cached, beside that of one of which nothing is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.prefix_cost.subject import Subject
from benchmarks.serving.client import Outcome
from benchmarks.serving.metrics import Answered


@dataclass(frozen=True)
class FirstTokens:
    """Of one service, a value for each round.

    new, again: seconds to the first token of a prompt that is not cached, and of one that begins with the same tokens.
    cached_tokens: of the latter, None where the service does not say.
    """

    label: str
    new: Sequence[float]
    again: Sequence[float]
    cached_tokens: Sequence[int | None]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return median(self.again) / median(self.new)


async def first_tokens(
    subjects: Sequence[Subject],
    prompt_tokens: int,
    shared_tokens: int,
    rounds: int,
    vocab_size: int,
    progress: Callable[[], None],
) -> list[FirstTokens]:
    """Ask each service for a random prompt, and then for one that shares its first tokens, in each round.

    All services are asked the same, one after the other, and each round begins with another one.
    """
    rng = np.random.default_rng(0)
    asked: dict[str, list[tuple[Outcome, Outcome]]] = {subject.label: [] for subject in subjects}
    for number in range(rounds):
        new = rng.integers(0, vocab_size, prompt_tokens).tolist()
        again = [*new[:shared_tokens], *rng.integers(0, vocab_size, prompt_tokens - shared_tokens).tolist()]
        first = number % len(subjects)
        for subject in [*subjects[first:], *subjects[:first]]:
            asked[subject.label].append((await subject.ask(new), await subject.ask(again)))
            progress()
    return [
        FirstTokens(
            label,
            new=[Answered(new).ttft for new, _ in outcomes],
            again=[Answered(again).ttft for _, again in outcomes],
            cached_tokens=[again.usage.cached_tokens if again.usage else None for _, again in outcomes],
        )
        for label, outcomes in asked.items()
    ]
