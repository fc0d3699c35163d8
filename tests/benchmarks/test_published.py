"""Selections of given LRU stack distances miss what they are meant to, under policies that are written out here."""

from bisect import bisect_right
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from base.errors import StartupError
from benchmarks.swap_in.eviction import Policy, load_trace, play_fifo, play_lru, play_optimum
from benchmarks.swap_in.published import LRU_MISSES, StackSelections, main, make_trace

K, CONTEXT, STEPS, SETTLING = 256, 4096, 100, 40
TRACE, FIRST = make_trace(K, CONTEXT, STEPS)


def misses_of(policy: str, size: int) -> list[int]:
    """Misses of each step after SETTLING, each token's own position left out, which is new."""
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for step, selected in enumerate(TRACE.tolist()):
        for position in selected:
            uses[position].append(step)
    entered: dict[int, int] = {}
    last: dict[int, tuple[int, int]] = {}

    def value(position: int) -> tuple[int, int]:
        if policy == "LRU":
            return last[position]
        if policy == "FIFO":
            return entered[position], 0
        later = bisect_right(uses[position], step)
        return -uses[position][later] if later < len(uses[position]) else -len(TRACE), 0

    counts = []
    for step, selected in enumerate(TRACE.tolist()):
        missed = [position for position in selected if position not in entered]
        entered |= dict.fromkeys(missed, step)
        unprotected = sorted(entered.keys() - set(selected), key=value)
        for position in unprotected[: max(0, len(entered) - size)]:
            del entered[position]
        last |= {position: (step, -rank) for rank, position in enumerate(selected)}
        counts.append(len(missed) - (step >= FIRST))
    return counts[FIRST + SETTLING :]


@pytest.mark.parametrize(("size", "rate"), [*zip((K, 2 * K, 4 * K), LRU_MISSES, strict=True)])
def test_an_lru_buffer_misses_in_every_step_what_was_published(size: int, rate: float) -> None:
    assert misses_of("LRU", size) == [round(rate * K)] * (STEPS - SETTLING)
    assert 1 - play_lru(TRACE, CONTEXT, size, FIRST + SETTLING) == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize(("policy", "play", "rate"), [("FIFO", play_fifo, 0.172), ("optimum", play_optimum, 0.082)])
def test_fifo_and_the_optimum_miss_about_what_was_published(policy: str, play: Policy, rate: float) -> None:
    missed = float(np.mean(misses_of(policy, 2 * K))) / K
    assert missed == pytest.approx(rate, abs=0.01)
    assert 1 - play(TRACE, CONTEXT, 2 * K, FIRST + SETTLING) == pytest.approx(missed, abs=0.01)


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


def test_a_short_context_is_refused() -> None:
    with pytest.raises(StartupError, match="need 2048 tokens, found 2047"):
        StackSelections(1, K, 2047)


def test_the_program_compares_with_what_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(top_k=64, context_length=1024, steps=20, seed=1, out=tmp_path / "made.npz")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-1] for row in rows[1:6]] == ["30.0", "13.4", "6.7", "17.2", "8.2"]
    trace, first = load_trace(tmp_path / "made.npz")
    assert (trace.shape, first) == ((84, 64), 1024)
