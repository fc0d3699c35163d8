"""What steps of several tokens select together."""

import numpy as np
import pytest

from benchmarks.swap_in.unions import play

FIRST = 100


@pytest.mark.parametrize("queries", [1, 2, 4])
def test_tokens_that_select_the_same_miss_once_and_make_no_larger_union(queries: int) -> None:
    trace = np.tile(np.arange(8), (40, 1))
    found = play("t", trace, FIRST, 16, queries, acceptance=1.0)
    assert (found.union, found.union_p99, found.cut) == (1.0, 1.0, 0.0)
    assert found.misses == pytest.approx(1 / 40)


def test_a_query_that_does_not_fit_is_cut_and_computed_again() -> None:
    trace = np.arange(40 * 2).reshape(40, 2)
    found = play("t", trace, FIRST, 4, 4, acceptance=1.0)
    assert found.union == 4.0
    assert found.cut == 0.5
    assert found.misses == 1.0


def test_rejected_drafts_miss_nothing_twice() -> None:
    trace = np.arange(40 * 2).reshape(40, 2)
    found = play("t", trace, FIRST, 64, 2, acceptance=0.0)
    assert found.misses == pytest.approx(1.0, abs=0.05)
