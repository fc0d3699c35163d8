"""What was measured, and what is said of it."""

from dataclasses import dataclass

from benchmarks.percentiles import Percentiles
from benchmarks.transfer.cases import Case
from benchmarks.transfer.groups import Group
from benchmarks.transfer.methods import Run


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
