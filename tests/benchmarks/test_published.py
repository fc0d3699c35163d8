"""Selections of given LRU stack distances miss what they are meant to."""

from pathlib import Path

import pytest
import torch

from benchmarks.swap_in.eviction import Policy, load_trace, play_fifo, play_lru, play_optimum
from benchmarks.swap_in.published import LRU_MISSES, StackSelections, main, make_trace

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
