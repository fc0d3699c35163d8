"""`python -m benchmarks.swap_in.foresight`: whether what was selected before foresees what a layer misses.

Recorded selections are played through a hot buffer. Guesses, before each step: what the layer selected for its last
tokens, and what each other trace, which is another layer of the same run, selected in this step. What the buffer holds
is not copied again.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.program import run
from benchmarks.swap_in.eviction import Trace, hot_slots, load_trace
from benchmarks.tables import table
from hisparse.residency import Residency

WINDOWS = (8, 32, 128)
"""Last tokens."""
_SETTLING_STEPS = 200


@dataclass(frozen=True)
class Foresight:
    """Sums over steps, by the name of the guess. guessed: positions that it would copy. right: those of the misses."""

    misses: int
    guessed: Counter[str]
    right: Counter[str]


def play(
    trace: Trace, first: int, hot_size: int, others: Mapping[str, Trace], since: int = _SETTLING_STEPS
) -> Foresight:
    """From step `since` on. The newest position is never missed."""
    context = first + len(trace)
    residency = Residency(1, 1, context, hot_size, torch.device("cpu"))
    residency.reset_empty(0)
    last_selected = np.full(context, -1 - max(WINDOWS))
    misses, guessed, right = 0, Counter[str](), Counter[str]()
    for step, selected in enumerate(trace):
        evicted = np.ones(context, dtype=bool)
        held = residency.position_at[0, 0].numpy()
        evicted[held[held >= 0]] = False
        newest = torch.tensor([first + step])
        plan = residency.resolve(0, torch.tensor([0]), torch.from_numpy(selected)[None, None], newest)
        if step >= since:
            missed = plan.miss_positions.numpy()
            misses += len(missed)
            guesses = {f"its last {window} tokens": last_selected >= step - window for window in WINDOWS}
            for name, other in others.items():
                guesses[name] = np.isin(np.arange(context), other[step])
                guesses[name][first + step] = False
            for name, guess in guesses.items():
                guessed[name] += int((guess & evicted).sum())
                right[name] += int((guess & evicted)[missed].sum())
        last_selected[selected[(selected >= 0) & (selected < first + step)]] = step
    return Foresight(misses, guessed, right)


def main(
    trace: Annotated[list[Path], typer.Option(help="Recorded selections (benchmarks.swap_in.record).")],
    hot_ratio: Annotated[float, typer.Option(help="Size of the hot buffer, as a multiple of top-k.")] = 2.0,
) -> None:
    shown = table("misses of", "guess", "foreseen, %", "copies for each", words=("misses of", "guess"))
    recorded = {f"{path.parent.name}/{path.stem}": load_trace(path) for path in trace}
    if len(found := {(*selected.shape[:1], first) for selected, first in recorded.values()}) > 1:
        raise StartupError(f"expected layers of one run, found (steps, first position) {sorted(found)}")
    if (steps := min(found)[0]) <= _SETTLING_STEPS:
        raise StartupError(f"{steps} steps were recorded: expected more than {_SETTLING_STEPS}")
    for name, (selected, first) in recorded.items():
        others = {other: of_other for other, (of_other, _) in recorded.items() if other != name}
        result = play(selected, first, hot_slots(hot_ratio, selected.shape[1]), others)
        for guess, guessed in result.guessed.items():
            right = result.right[guess]
            copies = f"{guessed / right:.0f}" if right else "none is right"
            shown.add_row(name, guess, f"{100 * right / max(1, result.misses):.0f}", copies)
    Console().print(shown)


if __name__ == "__main__":
    run(main)
