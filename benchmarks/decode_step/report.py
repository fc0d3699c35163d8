"""What was measured, as a table, JSON and a figure."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_step.timing import PARTS, REST, StepTiming
from benchmarks.decode_step.workload import GIB, Shape
from benchmarks.machine import this_machine
from benchmarks.plotting import new_figure

SCHEMA = 1
OWN = "own"
HISPARSE, RESIDENT = "HiSparse", "resident"


@dataclass(frozen=True)
class CaseResult:
    """One batch with one way to hold KV and to select. kv_bytes: hot slots in HBM, without index keys and tables."""

    batch: int
    selection: str
    tier: str
    kv_bytes: int
    timing: StepTiming


def ordered(results: list[CaseResult]) -> list[CaseResult]:
    """By batch, then by selection as first measured, with what is to be compared side by side."""
    selections = list(dict.fromkeys(result.selection for result in results))
    return sorted(results, key=lambda result: (result.batch, selections.index(result.selection)))


def print_results(results: list[CaseResult], shape: Shape, console: Console) -> None:
    """Steps and their parts in tables of 80 columns at most, two lines per batch and selection; and what they mean."""
    console.print(_steps(results), "")
    console.print(_parts(results), "")
    console.print(
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, top-k {shape.top_k}, bfloat16, "
        f"{shape.context} tokens per request, {torch.cuda.get_device_name()}. ms: median of replayed graphs, by the "
        "host's clock. Parts: milliseconds of kernels in replays, by their names; rest: what is left of the step "
        "(projections, feed-forward, storing and backing up new tokens, gaps). misses: per request and layer. GB/s: "
        "bytes swapped in, by the time in the swap-in kernel. selection: how many positions of each request and layer "
        "are new in each step, the others staying the same, or the random model's own.",
        highlight=False,
    )


def _steps(results: list[CaseResult]) -> Table:
    table = _table("steps", "KV GiB", "misses", "hit %", "ms", "ratio")
    steps = {(r.batch, r.selection, r.tier): r.timing.median_ms for r in results}
    for result in ordered(results):
        timing = result.timing
        resident = steps.get((result.batch, result.selection, RESIDENT))
        table.add_row(
            *_case(result),
            f"{result.kv_bytes / GIB:.1f}",
            f"{timing.misses:.0f}",
            f"{100 * timing.hit_rate:.1f}",
            f"{timing.median_ms:.2f}",
            f"{timing.median_ms / resident:.2f}" if resident and result.tier == HISPARSE else "",
        )
    return table


def _parts(results: list[CaseResult]) -> Table:
    table = _table("parts of a step, ms", *PARTS, REST, "GB/s")
    for result in ordered(results):
        timing, parts = result.timing, result.timing.parts
        table.add_row(
            *_case(result),
            *(f"{parts[part]:.2f}" for part in (*PARTS, REST)),
            f"{timing.num_bytes / parts['swap-in'] / 1e6:.0f}" if timing.num_bytes and parts["swap-in"] else "",
        )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("batch", "selection", "KV", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _case(result: CaseResult) -> tuple[str, str, str]:
    return str(result.batch), result.selection, result.tier


def write_json(path: Path, results: list[CaseResult], shape: Shape) -> None:
    """Everything that was measured so far."""
    document = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(),
        "machine": asdict(this_machine()),
        "shape": asdict(shape),
        "cases": [{**asdict(result), "parts_ms": result.timing.parts} for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def write_png(path: Path, results: list[CaseResult]) -> None:
    """Stacked bars of where a step's time goes: a panel per batch, each selection resident and through HiSparse."""
    batches = sorted({result.batch for result in results})
    figure = new_figure(figsize=(4 * len(batches), 4.2), layout="constrained")
    for axis, batch in zip(figure.subplots(1, len(batches), squeeze=False).flat, batches, strict=True):
        members = [result for result in ordered(results) if result.batch == batch]
        names = [f"{r.selection}\n{r.tier}" for r in members]
        bottoms = [0.0] * len(members)
        for part in (*PARTS, REST):
            heights = [max(0.0, r.timing.parts[part]) for r in members]
            axis.bar(names, heights, bottom=bottoms, label=part)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axis.set(title=f"batch {batch}")
        axis.tick_params(axis="x", labelsize="x-small", rotation=45)
    figure.axes[0].set_ylabel("ms per decode step")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")
    figure.savefig(path, dpi=130)
