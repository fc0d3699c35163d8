"""What is said of measurements follows from them."""

import json

import pytest

from benchmarks.machine import this_machine
from benchmarks.percentiles import Percentiles
from benchmarks.transfer.cases import Case, Protocol
from benchmarks.transfer.groups import Group
from benchmarks.transfer.methods import Run
from benchmarks.transfer.overlap import Overlap
from benchmarks.transfer.report import Report, document
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


def test_the_ceiling_is_the_better_of_its_kind_by_the_median() -> None:
    ceiling = RESULT.best(Group.CEILING)
    assert ceiling is not None
    assert ceiling.name == "polled"


def test_ratios_are_quotients_of_medians() -> None:
    ours = RESULT.methods[0]
    assert RESULT.ratio(ours, Group.CEILING) == pytest.approx(0.5)
    assert RESULT.ratio(ours, Group.TOKEN) == pytest.approx(20)
    assert RESULT.ratio(ours, Group.NIXL) is None
    assert RESULT.bytes_per_second(ours) == pytest.approx(1000 * 2 * 500 / 0.2)
    assert OVERLAP.ratio == pytest.approx(0.1)


def test_the_document_has_every_run_and_the_machine() -> None:
    report = Report([RESULT], [OVERLAP], {"initiator": this_machine()}, {"rounds": 3}, others=0.0)
    content = json.loads(json.dumps(document(report)))
    assert content["machines"]["initiator"]["cores"] >= 1
    [case] = content["cases"]
    ours, _, polled, token = case["methods"]
    assert ours["runs_seconds"] == [0.2, 0.1, 0.3]
    assert ours["speed_relative_to"] == {"ours": 1.0, "token": 20.0, "ceiling": 0.5}
    assert (polled["is_ceiling"], token["is_ceiling"]) == (True, False)
    assert content["overlaps"][0]["ratio"] == pytest.approx(0.1)
