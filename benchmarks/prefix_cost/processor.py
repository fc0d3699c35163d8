"""Processor time of prompts that share nothing, with a prefix cache and without one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.prefix_cost.subject import Subject
from benchmarks.serving.processes import processor_seconds

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
