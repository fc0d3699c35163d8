"""How good the replacement policy is, on traces that favour different things."""

import numpy as np
import pytest
from rich.console import Console

from benchmarks.swap_in.eviction import (
    SYNTHETIC,
    EvictionBench,
    EvictionResult,
    play_lru,
    play_optimum,
    run_eviction_bench,
)


@pytest.fixture(scope="module")
def results() -> list[EvictionResult]:
    return run_eviction_bench(EvictionBench(top_k=64, context_length=1024, steps=300), Console(quiet=True))


def test_the_policy_is_never_a_point_worse_than_exact_lru(results: list[EvictionResult]) -> None:
    assert {result.trace for result in results} == set(SYNTHETIC)
    assert [result for result in results if result.clock < result.lru - 1] == []


def test_nothing_beats_the_optimum(results: list[EvictionResult]) -> None:
    assert [result for result in results if max(result.clock, result.lru) > result.optimum] == []


def test_lru_and_the_optimum_on_a_trace_that_can_be_played_by_hand() -> None:
    """Room for two; the newest position is never selected."""
    trace = np.array([[0], [1], [2], [0], [1]])
    assert play_lru(trace, first=10, hot_size=2) == 0
    assert play_optimum(trace, first=10, hot_size=2) == pytest.approx(1 / 5)
