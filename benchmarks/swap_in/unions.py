"""`python -m benchmarks.swap_in.unions`: what steps of several tokens select together, and what they miss.

Recorded selections of consecutive tokens are played as steps that verify drafts. A rejected draft has selected as its
token will, in the step that computes it again: recorded traces have no wrong tokens.
"""

import random
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
from hisparse.sizing import step_window

MOST_QUERIES = 4


@dataclass(frozen=True)
class UnionResult:
    """Of one trace. union, union_p99: distinct older positions of a step, in units of top-k, the mean and the 99th
    percentile. cut: part of the queries that did not fit. misses: of each token that came, in units of top-k."""

    trace: str
    hot_size: int
    queries: int
    union: float
    union_p99: float
    cut: float
    misses: float


def play(name: str, trace: Trace, first: int, hot_size: int, queries: int, acceptance: float) -> UnionResult:
    """Steps of so many queries, whose drafts are right with that probability each, if those before are."""
    window, top_k = step_window(queries - 1), trace.shape[1]
    residency = Residency(1, 1, first + len(trace) + window, hot_size, torch.device("cpu"), window)
    residency.reset_empty(0)
    rng, row = random.Random(0), torch.tensor([0])
    unions, asked, cut, misses, step, tokens = [], 0, 0, 0, 0, 0
    while step + queries <= len(trace):
        selected = trace[step : step + queries]
        older = selected[(selected >= 0) & (selected < first + step)]
        unions.append(len(np.unique(older)) / top_k)
        plan = residency.resolve(0, row, torch.from_numpy(selected)[None], torch.tensor([first + step]))
        valid = int(plan.valid[0])
        asked, cut, misses = asked + queries, cut + queries - valid, misses + plan.misses
        accepted = 1
        while accepted < valid and rng.random() < acceptance:
            accepted += 1
        step, tokens = step + accepted, tokens + accepted
    return UnionResult(
        trace=name,
        hot_size=hot_size,
        queries=queries,
        union=float(np.mean(unions)),
        union_p99=float(np.percentile(unions, 99)),
        cut=cut / asked,
        misses=misses / tokens / top_k,
    )


def print_results(results: list[UnionResult], acceptance: float, console: Console) -> None:
    shown = table("trace", "hot slots", "queries", "union / k", "99%", "cut %", "misses % of k", words=("trace",))
    for one in results:
        numbers = f"{one.union:.2f}", f"{one.union_p99:.2f}", f"{100 * one.cut:.1f}", f"{100 * one.misses:.1f}"
        shown.add_row(one.trace, str(one.hot_size), str(one.queries), *numbers)
    console.print(shown)
    console.print(f"misses: of each token that came; a draft is right with probability {acceptance:g}", highlight=False)


def main(
    trace: Annotated[list[Path], typer.Option(help="Recorded selections (benchmarks.swap_in.record).")],
    hot_ratio: Annotated[float, typer.Option(help="Size of the hot buffer, as a multiple of top-k.")] = 2.0,
    acceptance: Annotated[float, typer.Option(min=0, max=1)] = 0.85,
) -> None:
    results = []
    for path in trace:
        recorded, first = load_trace(path)
        if len(recorded) < MOST_QUERIES:
            raise StartupError(f"{path}: {len(recorded)} steps were recorded: expected at least {MOST_QUERIES}")
        name, size = f"{path.parent.name}/{path.stem}", hot_slots(hot_ratio, recorded.shape[1])
        results += [play(name, recorded, first, size, queries, acceptance) for queries in range(1, MOST_QUERIES + 1)]
    print_results(results, acceptance, Console())


if __name__ == "__main__":
    run(main)
