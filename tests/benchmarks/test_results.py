"""What is said of measurements follows from them."""

import pytest

from benchmarks.percentiles import Percentiles
from benchmarks.transfer.cases import Case, Protocol
from benchmarks.transfer.groups import Group
from benchmarks.transfer.methods import Run
from benchmarks.transfer.overlap import Overlap
from benchmarks.transfer.results import CaseResult, MethodResult


def method(group: Group, *seconds: float, name: str = "") -> MethodResult:
    return MethodResult(name or group.label, group, tuple(Run(s, s / 100, 7) for s in seconds))


CASE = Case(tokens=1000, layers=2, item_bytes=500)
RESULT = CaseResult(
    CASE,
    (
        method(Group.OURS, 0.2, 0.1, 0.3),
        method(Group.CEILING, 0.5, 0.5, 0.5, name="synchronous"),
        method(Group.CEILING, 0.1, 0.1, 9.0, name="polled"),
        method(Group.TOKEN, 4.0),
    ),
)
OVERLAP = Overlap(
    Protocol.TCP, 1000, 10**6, 3, chunk_seconds=0.01, alone=(0.2, 0.1, 0.3), waits=(0.02, 0.5, 0.01), admissions=(0.0,)
)


def test_percentiles_interpolate() -> None:
    assert Percentiles.of([float(i) for i in range(101)]) == Percentiles(50.0, 90.0, 99.0)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0)
    assert Percentiles.of([1.0, 2.0]).p90 == pytest.approx(1.9)


def test_ratios_are_quotients_of_medians() -> None:
    ceiling, ours = RESULT.best(Group.CEILING), RESULT.methods[0]
    assert ceiling is not None
    assert ceiling.name == "polled", "the better of its kind, by the median"
    assert RESULT.ratio(ours, Group.CEILING) == pytest.approx(0.5)
    assert RESULT.ratio(ours, Group.TOKEN) == pytest.approx(20)
    assert RESULT.ratio(ours, Group.NIXL) is None
    assert RESULT.bytes_per_second(ours) == pytest.approx(1000 * 2 * 500 / 0.2)
    assert OVERLAP.ratio == pytest.approx(0.1)
