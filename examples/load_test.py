"""REQUESTS requests, CONCURRENCY at a time: what the service gives, and when the first tokens come."""

import asyncio
import statistics
import sys
import time

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, model: str, number: int, turn: asyncio.Semaphore) -> tuple[float, int]:
    """Seconds to the first token, and tokens."""
    async with turn:
        asked, first, tokens = time.monotonic(), 0.0, 0
        stream = await client.completions.create(
            model=model,
            prompt=f"Request {number}. " * 20,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            first = first or time.monotonic() - asked
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return first, tokens


async def main(requests: int, concurrency: int) -> None:
    async with AsyncOpenAI() as client:
        model = (await client.models.list()).data[0].id
        turn, began = asyncio.Semaphore(concurrency), time.monotonic()
        answers = await asyncio.gather(*(ask(client, model, number, turn) for number in range(requests)))
        seconds = time.monotonic() - began
    first = sorted(seconds_to_first for seconds_to_first, _ in answers)
    print(f"{requests} requests in {seconds:.1f} s, {sum(tokens for _, tokens in answers) / seconds:.0f} tokens/s")
    print(f"first token: median {statistics.median(first):.3f} s, slowest {first[-1]:.3f} s")


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
