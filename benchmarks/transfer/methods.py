"""Ways to send a case, all with the same face, and what was measured of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.percentiles import Percentiles
from benchmarks.transfer.cases import Case, Group
from benchmarks.transfer.placement import Placement
from transfer.planner import Descriptors


class MethodFailed(Exception):
    """A method could not send, or sent other bytes than it should: its figures would mean nothing."""


@dataclass(frozen=True)
class Run:
    """One transfer of all bytes. seconds: from the first thing done to the last byte landed, planning included."""

    seconds: float
    planning_seconds: float
    descriptors: int


class Method(Protocol):
    """placement: what lies where in the target when `run` has returned."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> Group: ...

    @property
    def placement(self) -> Placement: ...

    def run(self) -> Run:
        """Send everything once. Raises MethodFailed."""
        ...


@dataclass(frozen=True)
class Posting:
    """A method that plans all descriptors and hands them to something that writes them."""

    name: str
    group: Group
    placement: Placement
    plan: Callable[[], Descriptors]
    post: Callable[[Descriptors], None]

    def run(self) -> Run:
        started = time.perf_counter()
        batch = self.plan()
        planned = time.perf_counter()
        self.post(batch)
        return Run(time.perf_counter() - started, planned - started, len(batch.lengths))


@dataclass(frozen=True)
class MethodResult:
    """All timed runs of one method in one case; its bytes were compared with what they should be."""

    name: str
    group: Group
    runs: tuple[Run, ...]

    @property
    def seconds(self) -> Percentiles:
        return Percentiles.of([run.seconds for run in self.runs])

    @property
    def planning_seconds(self) -> float:
        """Median."""
        return Percentiles.of([run.planning_seconds for run in self.runs]).p50

    @property
    def descriptors(self) -> int:
        return self.runs[-1].descriptors


@dataclass(frozen=True)
class CaseResult:
    case: Case
    methods: tuple[MethodResult, ...]

    def best(self, group: Group) -> MethodResult | None:
        """The fastest method of a group by its median, or None if none was measured."""
        return min(
            (method for method in self.methods if method.group is group),
            key=lambda method: method.seconds.p50,
            default=None,
        )

    def bytes_per_second(self, method: MethodResult) -> float:
        """At the median latency."""
        return self.case.num_bytes / method.seconds.p50

    def ratio(self, method: MethodResult, to: Group) -> float | None:
        """How fast a method is as a part of the best of a group: the quotient of their medians."""
        other = self.best(to)
        return None if other is None else other.seconds.p50 / method.seconds.p50
