"""How good the replacement policy is, on traces that favour different things."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.passkey import CHECKPOINT
from benchmarks.swap_in.eviction import (
    SYNTHETIC,
    EvictionBench,
    load_trace,
    play_clock,
    play_lru,
    play_optimum,
    run_eviction_bench,
)
from benchmarks.swap_in.record import main as record_traces
from model.tiny import write_tiny_checkpoint


def test_the_policy_is_never_a_point_worse_than_exact_lru() -> None:
    results = run_eviction_bench(EvictionBench(top_k=64, context_length=1024, steps=300), Console(quiet=True))
    assert {result.trace for result in results} == set(SYNTHETIC)
    assert [result for result in results if result.clock < result.lru - 1] == []
    assert [result for result in results if max(result.clock, result.lru) > result.optimum] == []


def test_lru_and_the_optimum_on_a_trace_that_can_be_played_by_hand() -> None:
    """Room for two; the newest position is never selected."""
    trace = np.array([[0], [1], [2], [0], [1]])
    assert play_lru(trace, first=10, hot_size=2) == 0
    assert play_optimum(trace, first=10, hot_size=2) == pytest.approx(1 / 5)


@pytest.mark.parametrize(("trained", "layers"), [(True, 6), (False, 3)])
def test_what_a_model_selected_is_kept_as_well_as_by_exact_lru(trained: bool, layers: int, tmp_path: Path) -> None:
    """A trained model, and a random one whose layers share selections."""
    checkpoint = CHECKPOINT if trained else tmp_path / "tiny"
    if not trained:
        write_tiny_checkpoint(checkpoint, "glm_moe_dsa", seed=3)
    record_traces(checkpoint, None, prompt_tokens=500, steps=60, device="cpu", out=tmp_path / "traces")

    files = sorted((tmp_path / "traces").iterdir())
    assert len(files) == layers
    for file in files:
        trace, first = load_trace(file)
        assert (trace.shape, first) == ((60, 64), 499)
        newest = first + np.arange(60)[:, None]
        assert ((trace >= 0) & (trace <= newest)).all()
        assert all(len(set(row)) == 64 for row in trace.tolist())
        for hot_size in (80, 128, 256):
            clock = play_clock(trace, first, hot_size)
            assert clock >= play_lru(trace, first, hot_size) - 0.01
            assert not trained or clock > 0.5, "most of what a trained model selects, it selected a moment ago"
