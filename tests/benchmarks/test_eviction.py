"""How good replacement policies are, on recorded and made traces that favour different things."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.passkey import CHECKPOINT
from benchmarks.swap_in import foresight
from benchmarks.swap_in.eviction import (
    SYNTHETIC,
    EvictionBench,
    Policy,
    load_trace,
    play_clock,
    play_fifo,
    play_lru,
    play_optimum,
    run_eviction_bench,
)
from benchmarks.swap_in.published import LRU_MISSES, StackSelections, main, make_trace
from benchmarks.swap_in.record import main as record_traces
from model.tiny import write_tiny_checkpoint


def test_the_policy_is_never_a_point_worse_than_exact_lru() -> None:
    results = run_eviction_bench(EvictionBench(top_k=64, context_length=1024, steps=300), Console(quiet=True))
    assert {result.trace for result in results} == set(SYNTHETIC)
    assert [result for result in results if result.clock < result.lru - 1] == []
    assert [result for result in results if max(result.clock, result.lru) > result.optimum] == []


def test_guesses_are_what_was_selected_before_and_is_not_held() -> None:
    """Room for two: 0 is evicted by 2, and is missed again when the other layer has selected it."""
    trace, other = np.array([[0], [1], [2], [0]]), np.array([[4], [4], [0], [0]])
    result = foresight.play(trace, first=10, hot_size=2, others={"other": other}, since=2)
    assert result.misses == 2
    assert (result.guessed["its last 8 tokens"], result.right["its last 8 tokens"]) == (1, 1)
    assert (result.guessed["other"], result.right["other"]) == (1, 1)


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


K, CONTEXT, STEPS, SETTLING = 256, 4096, 100, 40
TRACE, FIRST = make_trace(K, CONTEXT, STEPS)


@pytest.mark.parametrize(
    ("play", "size", "rate"),
    [
        *((play_lru, size, rate) for size, rate in zip((K, 2 * K, 4 * K), LRU_MISSES, strict=True)),
        (play_fifo, 2 * K, 0.172),
        (play_optimum, 2 * K, 0.082),
    ],
)
def test_each_policy_misses_about_what_was_published(play: Policy, size: int, rate: float) -> None:
    assert 1 - play(TRACE, CONTEXT, size, FIRST + SETTLING) == pytest.approx(rate, abs=0.01)


def test_a_token_selects_distinct_positions_up_to_its_own() -> None:
    selections, again, other = (StackSelections(3, K, CONTEXT, seed) for seed in (0, 0, 1))
    for newest in range(CONTEXT, CONTEXT + 5):
        selected = selections.next(newest)
        assert selected.dtype == torch.int32
        assert (selected[:, 0] == newest).all()
        assert ((selected >= 0) & (selected <= newest)).all()
        assert all(len(set(row)) == K for row in selected.tolist())
        assert len({frozenset(row) for row in selected.tolist()}) == 3
        assert torch.equal(selected, again.next(newest))
        assert not torch.equal(selected, other.next(newest))


def test_the_program_compares_with_what_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(top_k=64, context_length=1024, steps=20, seed=1, out=tmp_path / "made.npz")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-1] for row in rows[1:6]] == ["30.0", "13.4", "6.7", "17.2", "8.2"]
    trace, first = load_trace(tmp_path / "made.npz")
    assert (trace.shape, first) == ((84, 64), 1024)
