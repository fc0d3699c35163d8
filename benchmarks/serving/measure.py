"""Puts one endpoint under one load after another."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from base.errors import StartupError
from benchmarks.serving.client import Client, Endpoint, Outcome, Request
from benchmarks.serving.load import Load
from benchmarks.serving.workload import Workload


@dataclass(frozen=True)
class Point:
    """A load, the requests that go ahead of it under the same load, and those that count."""

    load: Load
    warm_up: int
    requests: int


@dataclass(frozen=True)
class PointResult:
    """What became of all requests of a load point. client_cores: processor time of this process, per second."""

    label: str
    load: Load
    outcomes: Sequence[Outcome]
    client_cores: float


async def measure(
    endpoint: Endpoint, workload: Workload, points: Sequence[Point], timeout: float, progress: Callable[[Point], None]
) -> list[PointResult]:
    """Every load point, in order. `progress` is called after each request.

    Raises StartupError if none of the requests ahead of a point is answered.
    """
    results = []
    async with Client(endpoint, timeout) as client:
        for number, point in enumerate(points):

            async def send(request: Request, point: Point = point) -> Outcome:
                outcome = await client.send(request)
                progress(point)
                return outcome

            requests = [endpoint.request(p) for p in workload.draw(number, point.warm_up + point.requests)]
            _check_warm(endpoint, await point.load.drive(requests[: point.warm_up], send))
            wall, processor = time.perf_counter(), time.process_time()
            outcomes = await point.load.drive(requests[point.warm_up :], send)
            cores = (time.process_time() - processor) / (time.perf_counter() - wall)
            results.append(PointResult(endpoint.label, point.load, outcomes, cores))
    return results


def _check_warm(endpoint: Endpoint, outcomes: Sequence[Outcome]) -> None:
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    if failures and len(failures) == len(outcomes):
        raise StartupError(f"{endpoint.base_url} answers no request: {failures[0].kind}: {failures[0].message}")
