"""`python -m benchmarks.fragmentation`: the extents of a prompt's host slots after hours of churn."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.fragmentation.churn import Load
from benchmarks.fragmentation.simulation import Outcome, Reservations, simulate
from benchmarks.machine import this_machine
from benchmarks.plotting import check_installed, new_figure
from benchmarks.program import run

OCCUPANCIES = (0.70, 0.85, 0.95)
_BUCKET_S = 600.0
_WIDTH = 110


def main(
    hours: Annotated[float, typer.Option(min=1.0, help="Simulated hours.")] = 4.0,
    slots: Annotated[int, typer.Option(min=1 << 16, help="Slots of the pool.")] = 1 << 20,
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-fragmentation.json"),
    png_path: Annotated[Path, typer.Option("--png")] = Path("bench-fragmentation.png"),
) -> None:
    """Simulate a host pool under churn, at several occupancies, with this project's allocator and with plain ones."""
    check_installed()
    console = Console(stderr=True)
    outcomes: list[Outcome] = []
    for occupancy in track(OCCUPANCIES, "simulating", console=console):
        outcomes += simulate(Load(num_slots=slots, occupancy=occupancy, hours=hours))
    out = Console()
    out = out if out.is_terminal else Console(width=_WIDTH)
    out.print(table(outcomes))
    write_json(json_path, outcomes)
    write_png(png_path, outcomes)
    console.print(f"written: {json_path}, {png_path}", highlight=False)


def table(outcomes: Sequence[Outcome]) -> Table:
    """A line per occupancy and allocator: extents per prompt at its reservation, first hour against last."""
    table = Table(title="extents per prompt", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("occupancy", "allocator"):
        table.add_column(heading)
    for hour in ("first hour", "last hour"):
        for heading in ("mean", "p50", "p99"):
            table.add_column(f"{hour}\n{heading}", justify="right")
    table.add_column("prompts", justify="right")
    for outcome in outcomes:
        cells = [
            cell
            for hour in (outcome.first_hour, outcome.last_hour)
            for mean, p50, p99 in [summary(hour).values()]
            for cell in (f"{mean:.2f}", f"{p50:.0f}", f"{p99:.0f}")
        ]
        prompts = len(outcome.reservations.extents)
        table.add_row(f"{outcome.load.occupancy:.0%}", outcome.allocator, *cells, f"{prompts:,}")
    return table


def summary(reservations: Reservations) -> dict[str, float]:
    """Mean, p50 and p99 of the extents per prompt."""
    p50, p99 = np.percentile(reservations.extents, (50, 99))
    return {"mean": float(reservations.extents.mean()), "p50": float(p50), "p99": float(p99)}


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    content: dict[str, Any] = {
        "schema": 1,
        "benchmark": "fragmentation",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
        "outcomes": [
            {
                "load": asdict(outcome.load),
                "allocator": outcome.allocator,
                "prompts": len(outcome.reservations.extents),
                "prompt_tokens": int(outcome.reservations.tokens.sum()),
                "first_hour": summary(outcome.first_hour),
                "last_hour": summary(outcome.last_hour),
                "mean_by_bucket": [summary(bucket)["mean"] for bucket in buckets(outcome)],
                "bucket_seconds": _BUCKET_S,
            }
            for outcome in outcomes
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def buckets(outcome: Outcome) -> list[Reservations]:
    """The reservations by spans of time; an empty span is left out."""
    edges = np.arange(0.0, outcome.load.hours * 3600, _BUCKET_S)
    spans = [outcome.reservations.between(edge, edge + _BUCKET_S) for edge in edges]
    return [span for span in spans if len(span.extents)]


def write_png(path: Path, outcomes: Sequence[Outcome]) -> None:
    """A panel per occupancy: the mean over time, one line per allocator."""
    occupancies = sorted({outcome.load.occupancy for outcome in outcomes})
    figure = new_figure(figsize=(4.6 * len(occupancies), 4.0), layout="constrained")
    axes = figure.subplots(1, len(occupancies), squeeze=False, sharey=True)[0]
    for axis, occupancy in zip(axes, occupancies, strict=True):
        for outcome in outcomes:
            if outcome.load.occupancy == occupancy:
                spans = buckets(outcome)
                hours = [span.seconds[0] / 3600 for span in spans]
                axis.plot(hours, [summary(span)["mean"] for span in spans], label=outcome.allocator)
        axis.set(yscale="log", xlabel="hours", title=f"pool {occupancy:.0%} full")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("extents per prompt, mean of 10 minutes")
    axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run(main)
