"""When requests are sent: as soon as an earlier one is answered, or at their own pace."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Closed:
    """So many clients, each of which sends its next request when its last one is answered."""

    concurrency: int

    def __str__(self) -> str:
        return str(self.concurrency)

    async def drive(
        self, requests: Sequence[Request], send: Callable[[Request], Coroutine[Any, Any, Result]]
    ) -> list[Result]:
        """Send all; the results in the order of their ends. What `send` raises ends all of them."""
        waiting = iter(requests)
        results: list[Result] = []

        async def client() -> None:
            for request in waiting:
                results.append(await send(request))

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(client())
        return results


@dataclass(frozen=True)
class Open:
    """So many requests per second at random times, however many are under way; `inf`: all at once."""

    rate: float
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if math.isfinite(self.rate) else "inf"

    async def drive(
        self, requests: Sequence[Request], send: Callable[[Request], Coroutine[Any, Any, Result]]
    ) -> list[Result]:
        """Send all; the results in the order of the requests. What `send` raises ends all of them."""
        return await _send_at(arrivals(self.rate, len(requests), self.seed), requests, send)


@dataclass(frozen=True)
class Scheduled:
    """Each request at its own time, however many are under way: a trace, `speed` times as fast as it was recorded.

    times: seconds from the start to each request, ascending.
    """

    times: tuple[float, ...] = field(repr=False)
    speed: float = 1.0

    def __str__(self) -> str:
        return f"trace x{self.speed:g}"

    async def drive(
        self, requests: Sequence[Request], send: Callable[[Request], Coroutine[Any, Any, Result]]
    ) -> list[Result]:
        """Send all; the results in the order of the requests. What `send` raises ends all of them."""
        return await _send_at(self.times, requests, send)


Load = Closed | Open | Scheduled


async def _send_at(
    times: Sequence[float], requests: Sequence[Request], send: Callable[[Request], Coroutine[Any, Any, Result]]
) -> list[Result]:
    """Send each request so many seconds from now; the results in the order of the requests."""
    clock = asyncio.get_running_loop()
    start = clock.time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, after in zip(requests, times, strict=True):
            if (ahead := start + after - clock.time()) > 0:
                await asyncio.sleep(ahead)
            tasks.append(group.create_task(send(request)))
    return [task.result() for task in tasks]


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start to each arrival of a Poisson process, the first at 0; all 0 for an infinite rate."""
    pauses = np.random.default_rng(seed).exponential(1 / rate, max(0, count - 1))
    return [0.0, *np.cumsum(pauses).tolist()][:count]
