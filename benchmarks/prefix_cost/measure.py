"""Runs both measurements against two services that are up at the same time."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

from benchmarks.prefix_cost.figures import Subject, first_tokens, processor_times
from benchmarks.prefix_cost.report import CostReport
from benchmarks.serving.client import Client, Endpoint
from benchmarks.serving.services import Service

_AHEAD_TOKENS = 64
"""Of a prompt that is not timed, for what happens once."""


@dataclass(frozen=True)
class CostPlan:
    """prompt_tokens: of prompts whose first token is timed; shared_tokens: those of them that were seen before; rounds:
    such prompts to each service. pair_tokens: of the longest prompt whose processor time is taken; pairs: such prompts
    to each service."""

    prompt_tokens: int
    shared_tokens: int
    rounds: int
    pair_tokens: int
    pairs: int

    @property
    def longest(self) -> int:
        return max(self.prompt_tokens, self.pair_tokens, _AHEAD_TOKENS)


def measure(
    with_cache: Service,
    without: Service,
    plan: CostPlan,
    vocab_size: int,
    timeout: float,
    progress: Callable[[], None] = lambda: None,
) -> CostReport:
    """progress: called after each prompt of `rounds` and of `pairs`, for each service.

    Raises StartupError if a service does not start or does not answer.
    """
    with ExitStack() as stack:
        endpoints = [stack.enter_context(service.running()) for service in (with_cache, without)]
        return asyncio.run(_measure(endpoints, plan, vocab_size, timeout, progress))


async def _measure(
    endpoints: Sequence[Endpoint], plan: CostPlan, vocab_size: int, timeout: float, progress: Callable[[], None]
) -> CostReport:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(endpoint, timeout)) for endpoint in endpoints]
        subjects = [Subject(endpoint, client) for endpoint, client in zip(endpoints, clients, strict=True)]
        for subject in subjects:
            await subject.ask([0] * _AHEAD_TOKENS)
        first, second = subjects
        processor = None
        # First, while the cache is as empty as it gets.
        if plan.pairs:
            processor = await processor_times(first, second, plan.pair_tokens, plan.pairs, vocab_size, progress)
        timed = []
        if plan.rounds:
            timed = await first_tokens(
                subjects, plan.prompt_tokens, plan.shared_tokens, plan.rounds, vocab_size, progress
            )
    return CostReport(plan.prompt_tokens, plan.shared_tokens, timed, processor)
