"""`python -m benchmarks.planner`: how long it takes to plan the transfer of a long prompt, all layers.

What a prefill node does before it sends: expand extents to slots and pages to items, coalesce runs, and make the
addresses of every layer from them. In one piece, where a node plans chunk by chunk.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import this_machine
from benchmarks.program import run
from transfer.planner import Descriptors, Int64s, expand_extents, expand_pages, plan_runs

Extents = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """A prompt in `pages`, in the order of its positions, that goes to `extents` in each of so many layers."""

    name: str
    pages: Int64s
    page_size: int
    extents: Extents
    layers: int
    item_bytes: int


@dataclass(frozen=True)
class Planned:
    """Medians in milliseconds: until there are runs, and until there are addresses for every layer."""

    case: str
    runs: int
    runs_ms: float
    total_ms: float


def cases(tokens: int, layers: int, item_bytes: int, page_size: int) -> list[Case]:
    """Source pages are scattered in all of them."""

    def pages(size: int) -> Int64s:
        return np.random.default_rng(0).permutation(-(-tokens // size)).astype(np.int64)

    def apart(size: int) -> Extents:
        """Pieces of `size` slots of which no two are neighbours, in random order."""
        starts = np.random.default_rng(1).permutation(-(-tokens // size)) * (size + 1)
        left = tokens - size * (len(starts) - 1)
        return tuple((int(start), size if at < len(starts) - 1 else left) for at, start in enumerate(starts))

    return [
        Case("slots contiguous", pages(page_size), page_size, ((0, tokens),), layers, item_bytes),
        Case(f"every page of {page_size} apart", pages(page_size), page_size, apart(page_size), layers, item_bytes),
        Case("page size 1, every slot apart, one layer", pages(1), 1, apart(1), 1, item_bytes),
    ]


def plan(case: Case) -> tuple[int, float, float]:
    """Runs of the case, and seconds until they were there, and until all addresses were."""
    tokens = sum(length for _, length in case.extents)
    started = time.perf_counter()
    items = expand_pages(case.pages, case.page_size, 0, tokens)
    runs = plan_runs(items, expand_extents(case.extents))
    planned = time.perf_counter()
    offsets = runs.descriptors(0, 0, case.item_bytes)
    _every_layer(offsets.at, case)
    return len(runs), planned - started, time.perf_counter() - started


def _every_layer(at: Callable[[int, int], Descriptors], case: Case) -> None:
    stride = case.item_bytes << 20
    for layer in range(case.layers):
        at(layer * stride, layer * stride)


def measure(case: Case, rounds: int) -> Planned:
    """Plan again and again; the first time does not count."""
    plan(case)
    counts, runs, totals = zip(*(plan(case) for _ in range(rounds)), strict=True)
    return Planned(case.name, counts[0], 1e3 * statistics.median(runs), 1e3 * statistics.median(totals))


def main(
    tokens: Annotated[int, typer.Option(min=1)] = 128 << 10,
    layers: Annotated[int, typer.Option(min=1)] = 61,
    item_bytes: Annotated[int, typer.Option(min=1)] = 1152,
    page_size: Annotated[int, typer.Option(min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 21,
) -> None:
    """Time the planning of a long prompt, by how its destination slots lie."""
    table = Table(box=None, pad_edge=False)
    for heading in ("destination", "runs", "runs ms", "all layers ms"):
        table.add_column(heading, justify="left" if heading == "destination" else "right", no_wrap=True)
    for case in cases(tokens, layers, item_bytes, page_size):
        planned = measure(case, rounds)
        table.add_row(planned.case, str(planned.runs), f"{planned.runs_ms:.2f}", f"{planned.total_ms:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"{tokens} tokens, {layers} layers, source pages scattered; medians of {rounds}. {this_machine()}",
        highlight=False,
    )


if __name__ == "__main__":
    run(main)
