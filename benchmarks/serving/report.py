"""What is shown of a run: tables for people, JSON for programs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.disturbance import warning
from benchmarks.machine import Machine
from benchmarks.percentiles import Percentiles
from benchmarks.serving.load import Load
from benchmarks.serving.measure import PointResult
from benchmarks.serving.metrics import Answered, Slo, Summary, summarize

SCHEMA = 1
_BUSY = 0.8
"""Of a core: a client that takes more may keep events waiting."""


@dataclass(frozen=True)
class PointReport:
    """A load point of one service and its figures."""

    result: PointResult
    summary: Summary

    @property
    def label(self) -> str:
        return self.result.label

    @property
    def load(self) -> Load:
        return self.result.load


@dataclass(frozen=True)
class Report:
    """points: service by service. others: cores that other processes kept busy, None where that cannot be told."""

    points: Sequence[PointReport]
    slo: Slo
    options: Mapping[str, object]
    machine: Machine
    others: float | None

    @classmethod
    def of(
        cls,
        results: Sequence[PointResult],
        slo: Slo,
        options: Mapping[str, object],
        machine: Machine,
        others: float | None,
    ) -> "Report":
        points = [PointReport(result, summarize(result.outcomes, slo)) for result in results]
        return cls(points, slo, options, machine, others)

    @property
    def by_load(self) -> list[PointReport]:
        """The services under one load beside each other."""
        loads = list(dict.fromkeys(point.load for point in self.points))
        return sorted(self.points, key=lambda point: loads.index(point.load))


def print_report(report: Report, console: Console) -> None:
    """A table of rates, one of times, and what is to be known of them."""
    console.print(_rates(report), "")
    console.print(_times(report), "")
    for point in report.points:
        for remark in remarks(point):
            console.print(f"[yellow]{point.label}, {point.load}: {remark}[/yellow]", highlight=False)
    console.print(f"client: {report.machine}", highlight=False)
    if report.others is not None and (text := warning(report.others)):
        console.print(f"[yellow]{text}[/yellow]", highlight=False)


def remarks(point: PointReport) -> list[str]:
    """Failures, counts that do not agree, a client that may have been too slow."""
    counts, answered = point.summary.counts, point.summary.answered
    found = [f"{number} failed: {kind}: {_example(point, kind)}" for kind, number in point.summary.failed.items()]
    for number, what in (
        (counts.no_usage, "came without usage: their tokens are those counted"),
        (counts.miscounted, "have other tokens in their usage than were counted in events"),
        (counts.short, "have fewer tokens than asked for"),
        (counts.other_prompt, "have prompts of other lengths in their usage than were sent"),
    ):
        if number:
            found.append(f"{number} of {answered} answers {what}")
    if point.result.client_cores > _BUSY:
        found.append(f"the client took {point.result.client_cores:.2f} of a core: it may be what was measured")
    return found


def _example(point: PointReport, kind: str) -> str:
    failures = (outcome.failure for outcome in point.result.outcomes)
    return next(failure.message for failure in failures if failure and failure.kind == kind)


def _rates(report: Report) -> Table:
    columns: dict[str, Callable[[PointReport], str]] = {
        "answered": lambda point: str(point.summary.answered),
        "failed": lambda point: str(sum(point.summary.failed.values())),
        "seconds": lambda point: f"{point.summary.seconds:.1f}",
        "in flight": lambda point: f"{point.summary.in_flight:.1f}",
        "requests/s": lambda point: f"{point.summary.requests_per_s:.2f}",
        "input tokens/s": lambda point: f"{point.summary.input_tokens_per_s:.0f}",
        "output tokens/s": lambda point: f"{point.summary.output_tokens_per_s:.0f}",
    }
    if report.slo:
        columns["good requests/s"] = lambda point: f"{point.summary.goodput:.2f}"
    columns["client cores"] = lambda point: f"{point.result.client_cores:.2f}"
    return _table(report, "rates", columns)


def _times(report: Report) -> Table:
    return _table(
        report,
        "times, ms: p50 / p90 / p99",
        {
            "TTFT": lambda point: _ms(point.summary.ttft),
            "ITL": lambda point: _ms(point.summary.itl),
            "TPOT": lambda point: _ms(point.summary.tpot),
            "end to end": lambda point: _ms(point.summary.latency),
        },
    )


def _table(report: Report, title: str, columns: Mapping[str, Callable[[PointReport], str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("load", justify="right", no_wrap=True)
    several = len({point.label for point in report.points}) > 1
    if several:
        table.add_column("service")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for point in report.by_load:
        label = [point.label] if several else []
        table.add_row(str(point.load), *label, *(cell(point) for cell in columns.values()))
    return table


def _ms(seconds: Percentiles | None) -> str:
    if seconds is None:
        return "-"
    return " / ".join(f"{1000 * value:.1f}" for value in (seconds.p50, seconds.p90, seconds.p99))


def document(report: Report) -> dict[str, Any]:
    """Everything, each request included: seconds throughout."""
    return {
        "schema": SCHEMA,
        "benchmark": "serving",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(report.machine),
        "cores_busy_with_other_processes": report.others,
        "options": dict(report.options),
        "points": [_point(point) for point in report.points],
    }


def _point(point: PointReport) -> dict[str, Any]:
    start = min(outcome.started for outcome in point.result.outcomes)
    requests = []
    for outcome in point.result.outcomes:
        answered = Answered(outcome) if outcome.failure is None else None
        requests.append(
            {
                "started": round(outcome.started - start, 6),
                "seconds": round(outcome.ended - outcome.started, 6),
                "input_tokens": outcome.request.input_tokens,
                "asked_output_tokens": outcome.request.output_tokens,
                "usage": asdict(outcome.usage) if outcome.usage else None,
                "failure": asdict(outcome.failure) if outcome.failure else None,
                "ttft": round(answered.ttft, 6) if answered else None,
                "gaps": [round(gap, 6) for gap in answered.gaps] if answered else [],
            }
        )
    return {
        "service": point.label,
        "load": {"kind": type(point.load).__name__.lower(), "value": str(point.load)},
        "client_cores": point.result.client_cores,
        **asdict(point.summary),
        "remarks": remarks(point),
        "requests": requests,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n")
