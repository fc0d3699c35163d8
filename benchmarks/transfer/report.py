"""What is shown of a run: a table for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.transfer.methods import Group
from benchmarks.transfer.results import CaseResult, MethodResult, Percentiles

SCHEMA = 1

_COLUMNS = (
    ("p50 ms", 8),
    ("p90 ms", 8),
    ("p99 ms", 8),
    ("GB/s", 5),
    ("descriptors", 11),
    ("plan ms", 7),
    ("of ceiling", 10),
    ("runs", 4),
)


def table(result: CaseResult) -> Table:
    """A line per method of one case. The ceiling has a star."""
    table = Table(title=str(result.case), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", min_width=32)
    for heading, width in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    ceiling = result.best(Group.CEILING)
    for method in result.methods:
        table.add_row(method.name + (" *" if method is ceiling else ""), *_figures(result, method))
    return table


def _figures(result: CaseResult, method: MethodResult) -> list[str]:
    seconds = method.seconds
    ratio = result.ratio(method, Group.CEILING)
    return [
        *(f"{1000 * value:.1f}" for value in (seconds.p50, seconds.p90, seconds.p99)),
        f"{result.bytes_per_second(method) / 1e9:.2f}",
        f"{method.descriptors:,}",
        f"{1000 * method.planning_seconds:.1f}",
        "" if ratio is None else f"{ratio:.0%}",
        str(len(method.runs)),
    ]


def document(
    results: Sequence[CaseResult], machines: Mapping[str, Machine], options: Mapping[str, object]
) -> dict[str, Any]:
    """Everything, each timed run included: seconds and bytes throughout. machines: by role."""
    return {
        "schema": SCHEMA,
        "benchmark": "transfer",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machines": {role: asdict(machine) for role, machine in machines.items()},
        "options": dict(options),
        "cases": [_case(result) for result in results],
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
        "group": method.group.name.lower(),
        "bytes_verified": True,
        "seconds": asdict(method.seconds),
        "runs_seconds": [run.seconds for run in method.runs],
        "planning_seconds": asdict(Percentiles.of([run.planning_seconds for run in method.runs])),
        "descriptors": method.descriptors,
        "bytes_per_second": result.bytes_per_second(method),
        "is_ceiling": method is result.best(Group.CEILING),
        "speed_relative_to": {
            group.name.lower(): result.ratio(method, group) for group in Group if result.best(group) is not None
        },
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
