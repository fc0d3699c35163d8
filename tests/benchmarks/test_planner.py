"""The cases whose planning is timed are what their names say."""

from itertools import pairwise

from benchmarks.planner import cases, measure, plan
from transfer.planner import expand_extents


def test_cases_lie_as_their_names_say() -> None:
    contiguous, apart, single = cases(tokens=1000, layers=3, item_bytes=16, page_size=64)
    assert expand_extents(contiguous.extents).tolist() == list(range(1000))
    for case, size in ((apart, 64), (single, 1)):
        assert sum(length for _, length in case.extents) == 1000
        taken = sorted(case.extents)
        assert all(start + length < after for (start, length), (after, _) in pairwise(taken))
        assert max(length for _, length in case.extents) == size
        assert plan(case)[0] == len(case.extents) == -(-1000 // size)


def test_what_is_measured_includes_every_layer() -> None:
    contiguous = cases(tokens=1000, layers=3, item_bytes=16, page_size=64)[0]
    planned = measure(contiguous, rounds=3)
    assert planned.runs <= 16
    assert 0 < planned.runs_ms < planned.total_ms
