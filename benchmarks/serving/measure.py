"""Puts one endpoint under one load after another."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from base.errors import StartupError
from benchmarks.metric_pages import Metrics
from benchmarks.serving.client import Client, Endpoint, Outcome, Request
from benchmarks.serving.conversation import Opening, Send, converse
from benchmarks.serving.load import Closed, Load, Scheduled
from benchmarks.serving.processes import Counters
from benchmarks.serving.workload import Workload


@dataclass(frozen=True)
class Point:
    """A load, the sessions that go ahead of it, and those that count. turns: requests of each of these, at most.

    Ahead of a trace its requests are sent one after the other, ahead of other loads under the same load.
    """

    load: Load
    warm_up: int
    requests: int
    turns: int = 1

    @property
    def most_requests(self) -> int:
        return self.warm_up + self.requests * self.turns


@dataclass(frozen=True)
class PointResult:
    """What became of all requests of a load point. client_cores: processor time of this process, per second.

    ahead: of the requests that do not count. counted: by how much each counter of the nodes grew, None where that
    is not known.
    """

    label: str
    load: Load
    outcomes: Sequence[Outcome]
    client_cores: float
    ahead: Sequence[Outcome] = ()
    counted: Metrics | None = None


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

            async def hold(opening: Opening, send: Send = send) -> list[Outcome]:
                return await converse(endpoint, opening, send)

            drawn = workload.draw(number, point.requests, point.warm_up)
            openings = [Opening(endpoint.request(session.turns[0]), session) for session in drawn]
            load_ahead = Closed(1) if isinstance(point.load, Scheduled) else point.load
            ahead = _joined(await load_ahead.drive(openings[: point.warm_up], hold))
            _check_warm(endpoint, ahead)
            counters = Counters(endpoint)
            wall, processor = time.perf_counter(), time.process_time()
            outcomes = _joined(await point.load.drive(openings[point.warm_up :], hold))
            cores = (time.process_time() - processor) / (time.perf_counter() - wall)
            results.append(PointResult(endpoint.label, point.load, outcomes, cores, ahead, counters.grown()))
    return results


def _joined(groups: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    return [outcome for group in groups for outcome in group]


def _check_warm(endpoint: Endpoint, outcomes: Sequence[Outcome]) -> None:
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    if failures and len(failures) == len(outcomes):
        raise StartupError(f"{endpoint.base_url} answers no request: {failures[0].kind}: {failures[0].message}")
