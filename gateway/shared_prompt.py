"""Choices of one prompt have the same log probabilities of its tokens, which are computed for the first one alone."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from control.prompt_logprobs import PromptLogprobTable
from gateway.choice import Delta

_Deltas = AsyncGenerator[Sequence[Delta], None]


def with_shared_prompts(streams: Sequence[_Deltas], choices: int) -> list[_Deltas]:
    """Streams of answers, `choices` of each prompt, whose first deltas all have what those of a prompt's first have.

    What the other ones begin with waits for that. What they go on with stays in their attempts, as that of any answer
    whose client is slow, so it is bounded by the tokens that an answer may have. All streams have to be read at the
    same time, and none may be read after one has failed (`merged`).
    """
    shared: list[_Deltas] = []
    for start in range(0, len(streams), choices):
        prompt: asyncio.Future[PromptLogprobTable] = asyncio.get_running_loop().create_future()
        first, *others = streams[start : start + choices]
        shared += [_giving(first, prompt), *(_taking(other, prompt) for other in others)]
    return shared


async def _giving(stream: _Deltas, prompt: asyncio.Future[PromptLogprobTable]) -> _Deltas:
    async with aclosing(stream):
        async for deltas in stream:
            if deltas[0].prompt is not None and not prompt.done():
                prompt.set_result(deltas[0].prompt)
            yield deltas


async def _taking(stream: _Deltas, prompt: asyncio.Future[PromptLogprobTable]) -> _Deltas:
    async with aclosing(stream):
        async for deltas in stream:
            if deltas[0].first:
                table = await prompt
                deltas = [deltas[0]._replace(prompt=table), *deltas[1:]]
            yield deltas
