"""What is shown of a run: a table for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.disturbance import warning
from benchmarks.machine import Machine
from benchmarks.percentiles import Percentiles
from benchmarks.tables import table
from benchmarks.transfer.cases import Group
from benchmarks.transfer.methods import CaseResult, MethodResult
from benchmarks.transfer.overlap import Overlap

SCHEMA = 1

_COLUMNS = ("p50", "p90", "p99", "GB/s", "descriptors", "plan", "1 MiB", "runs")


@dataclass(frozen=True)
class Report:
    """machines: by role, of one machine only the initiator's. others: cores that other processes kept busy."""

    results: Sequence[CaseResult]
    overlaps: Sequence[Overlap]
    machines: Mapping[str, Machine]
    options: Mapping[str, object]
    others: float | None


def print_report(report: Report, console: Console) -> None:
    """Tables of 80 columns at most, one per case and a summary of all, the overlaps and the machines."""
    for result in report.results:
        console.print(case_table(result), "")
    console.print(summary(report.results), "")
    for overlap in report.overlaps:
        console.print(str(overlap), highlight=False)
    console.print(
        "* the faster with descriptors of 1 MiB, whose speed 1 MiB gives a part of. plan: the time for planning alone. "
        "per page, per token: descriptors or copies of that size. Of each method's bytes, every one was compared.",
        highlight=False,
    )
    for role, machine in report.machines.items():
        console.print(f"{role}: {machine}", highlight=False)
    if report.others is not None and (text := warning(report.others)):
        console.print(f"[yellow]{text}[/yellow]", highlight=False)


def case_table(result: CaseResult) -> Table:
    """A line per method of one case, times in ms. The faster of those with 1 MiB has a star."""
    shown = _table(f"{result.case}, ms", *_COLUMNS)
    large = result.best(Group.LARGE)
    for method in result.methods:
        shown.add_row(method.name + (" *" if method is large else ""), *_figures(result, method))
    return shown


def summary(results: Sequence[CaseResult]) -> Table:
    """A line per case: this project's way beside the best of each other kind, as quotients of median latencies."""
    title = "ours, beside the others: p50 in ms, and speed as a part of that of"
    shown = _table(title, "p50", "1 MiB", "per page", "per token", "NIXL")
    for result in results:
        if (ours := result.best(Group.OURS)) is None:
            continue
        ratios = [result.ratio(ours, group) for group in (Group.LARGE, Group.PAGE, Group.TOKEN, Group.NIXL)]
        shown.add_row(str(result.case), f"{1000 * ours.seconds.p50:.1f}", *(_times(ratio) for ratio in ratios))
    return shown


def _table(title: str, *headings: str) -> Table:
    """What the lines are about wraps, so that figures are whole in 80 columns."""
    return table("", *headings, title=title, words=("",), folds=True, collapse_padding=True)


def _times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.0%}" if ratio < 2 else f"{ratio:.1f} x"


def _figures(result: CaseResult, method: MethodResult) -> list[str]:
    seconds = method.seconds
    ratio = result.ratio(method, Group.LARGE)
    return [
        *(f"{1000 * value:.1f}" for value in (seconds.p50, seconds.p90, seconds.p99)),
        f"{result.bytes_per_second(method) / 1e9:.2f}",
        f"{method.descriptors:,}",
        f"{1000 * method.planning_seconds:.1f}",
        "" if ratio is None else f"{ratio:.0%}",
        str(len(method.runs)),
    ]


def document(report: Report) -> dict[str, Any]:
    """Everything, each timed run included: seconds and bytes throughout."""
    return {
        "schema": SCHEMA,
        "benchmark": "transfer",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machines": {role: asdict(machine) for role, machine in report.machines.items()},
        "cores_busy_with_other_processes": report.others,
        "options": dict(report.options),
        "cases": [_case(result) for result in report.results],
        "overlaps": [{**asdict(overlap), "ratio": overlap.ratio} for overlap in report.overlaps],
    }


def _case(result: CaseResult) -> dict[str, Any]:
    return {
        "case": asdict(result.case),
        "bytes": result.case.num_bytes,
        "methods": [_method(result, method) for method in result.methods],
    }


def _method(result: CaseResult, method: MethodResult) -> dict[str, Any]:
    return {
        "name": method.name,
        "group": method.group.value,
        "bytes_verified": True,
        "seconds": asdict(method.seconds),
        "runs_seconds": [run.seconds for run in method.runs],
        "planning_seconds": asdict(Percentiles.of([run.planning_seconds for run in method.runs])),
        "descriptors": method.descriptors,
        "bytes_per_second": result.bytes_per_second(method),
        "is_best_large": method is result.best(Group.LARGE),
        "speed_relative_to": {
            group.value: result.ratio(method, group) for group in Group if result.best(group) is not None
        },
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
