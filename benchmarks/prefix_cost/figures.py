"""Time to first token of cached prompts, and processor time of those that share nothing, with a cache and without."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from base.errors import StartupError
from benchmarks.serving.client import Client, Endpoint, Outcome
from benchmarks.serving.metrics import Answered
from benchmarks.serving.processes import processor_seconds
from benchmarks.serving.workload import Prompt

_SETTLE_S = 0.05
"""After an answer: a node puts what it has into its cache when the client has its last token already."""


@dataclass(frozen=True)
class Subject:
    """An endpoint and the client for it."""

    endpoint: Endpoint
    client: Client

    @property
    def label(self) -> str:
        return self.endpoint.label

    async def ask(self, token_ids: Sequence[int], output_tokens: int = 1) -> Outcome:
        """Returns when the service has been left alone for a moment. Raises StartupError for a request that fails."""
        outcome = await self.client.send(self.endpoint.request(Prompt(list(token_ids), output_tokens)))
        if outcome.failure is not None:
            kind, message = outcome.failure.kind, outcome.failure.message
            raise StartupError(f"{self.label}: {len(token_ids)} tokens are not answered: {kind}: {message}")
        await asyncio.sleep(_SETTLE_S)
        return outcome


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


_OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds of all processes of a service, for each pair of requests: one to each service, with the same prompt.

    tokens: of the prompts.
    """

    labels: tuple[str, str]
    first: Sequence[float]
    second: Sequence[float]
    tokens: Sequence[int]

    @property
    def ratios(self) -> list[float]:
        """Of the first service to the second, pair by pair."""
        return [one / other for one, other in zip(self.first, self.second, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def ratio_of_sums(self) -> float:
        return sum(self.first) / sum(self.second)


async def processor_times(
    first: Subject, second: Subject, most_tokens: int, pairs: int, vocab_size: int, progress: Callable[[], None]
) -> ProcessorTimes:
    """Ask both services for the same random prompts of 1 to `most_tokens` tokens, in turns which of them is first.

    A service's time lasts until the moment after its answer is over, and includes what it does when it is idle.
    """
    rng = np.random.default_rng(1)
    taken: dict[str, list[float]] = {first.label: [], second.label: []}
    tokens: list[int] = []
    for number in range(pairs):
        tokens.append(int(rng.integers(1, most_tokens + 1)))
        prompt = rng.integers(0, vocab_size, tokens[-1]).tolist()
        for subject in (first, second) if number % 2 else (second, first):
            taken[subject.label].append(await _cost(subject, prompt))
            progress()
    return ProcessorTimes((first.label, second.label), taken[first.label], taken[second.label], tokens)


async def _cost(subject: Subject, prompt: Sequence[int]) -> float:
    process_id = subject.endpoint.process_id
    assert process_id is not None, "the service was not started here"
    before = processor_seconds(process_id)
    await subject.ask(prompt, _OUTPUT_TOKENS)
    return processor_seconds(process_id) - before
