"""What is shown of a run: tables for people, JSON for programs."""

import json
from collections import defaultdict
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
from benchmarks.prefix.policies import IdealCache
from benchmarks.serving.hits import PrefixHits
from benchmarks.serving.load import Load
from benchmarks.serving.measure import PointResult
from benchmarks.serving.metrics import Answered, Slo, Summary, summarize
from benchmarks.tables import table

SCHEMA = 1
_BUSY = 0.8
"""Of a core: a client that takes more may keep events waiting."""


@dataclass(frozen=True)
class PointReport:
    """A load point of one service and its figures. hits: None where prompts share nothing."""

    result: PointResult
    summary: Summary
    hits: PrefixHits | None = None

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
        finds_prefixes: bool = False,
    ) -> "Report":
        """results: service by service, in the order of their loads. finds_prefixes: whether to report `hits`."""
        hits: list[PrefixHits | None] = [None] * len(results)
        if finds_prefixes:
            # What a service was asked under one load, it may have cached under the next.
            caches: dict[str, IdealCache] = defaultdict(IdealCache)
            hits = [PrefixHits.of(result, caches[result.label]) for result in results]
        summaries = [summarize(result.outcomes, slo) for result in results]
        points = [PointReport(*parts) for parts in zip(results, summaries, hits, strict=True)]
        return cls(points, slo, options, machine, others)

    @property
    def by_load(self) -> list[PointReport]:
        """The services under one load beside each other."""
        loads = list(dict.fromkeys(point.load for point in self.points))
        return sorted(self.points, key=lambda point: loads.index(point.load))


def print_report(report: Report, console: Console) -> None:
    """Tables of 80 columns at most: requests, rates, times; and what is to be known of them."""
    for shown in (_requests(report), _rates(report), _latencies(report), _gaps(report)):
        console.print(shown, "")
    if any(point.hits for point in report.points):
        console.print(_prefixes(report))
        console.print(_PREFIXES_SAY, "", highlight=False)
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
    if point.hits and point.hits.unknown:
        found.append(f"{point.hits.unknown} of {answered} answers do not say how much of their prompt was cached")
    if point.result.client_cores > _BUSY:
        found.append(f"the client took {point.result.client_cores:.2f} of a core: it may be what was measured")
    return found


def _example(point: PointReport, kind: str) -> str:
    failures = (outcome.failure for outcome in point.result.outcomes)
    return next(failure.message for failure in failures if failure and failure.kind == kind)


_Column = tuple[str, Callable[[PointReport], str]]
"""A heading, and what stands below it."""


def _requests(report: Report) -> Table:
    return _table(
        report,
        "requests",
        ("answered", lambda point: str(point.summary.answered)),
        ("failed", lambda point: str(sum(point.summary.failed.values()))),
        ("seconds", lambda point: f"{point.summary.seconds:.1f}"),
        ("in flight", lambda point: f"{point.summary.in_flight:.1f}"),
        ("client cores", lambda point: f"{point.result.client_cores:.2f}"),
    )


def _rates(report: Report) -> Table:
    good: list[_Column] = [("good\nrequests", lambda point: f"{point.summary.goodput:.2f}")] if report.slo else []
    return _table(
        report,
        "rates, per second",
        ("requests", lambda point: f"{point.summary.requests_per_s:.2f}"),
        *good,
        ("input\ntokens", lambda point: f"{point.summary.input_tokens_per_s:.0f}"),
        ("output\ntokens", lambda point: f"{point.summary.output_tokens_per_s:.0f}"),
    )


def _latencies(report: Report) -> Table:
    columns = *_spread("TTFT", lambda summary: summary.ttft), *_spread("end to end", lambda summary: summary.latency)
    return _table(report, "times of a request, ms", *columns)


def _gaps(report: Report) -> Table:
    columns = *_spread("ITL", lambda summary: summary.itl), *_spread("TPOT", lambda summary: summary.tpot)
    return _table(report, "times between tokens, ms", *columns)


_PREFIXES_SAY = (
    "hits: cached tokens of all prompt tokens, by usage; ideal: with a cache that keeps every whole block of 64; sent: "
    "KV that prefill nodes wrote"
)


def _prefixes(report: Report) -> Table:
    """What a cache found and what that is good for, the figures of other tables again, to be read side by side."""

    def hits(point: PointReport) -> str:
        return _percent(point.hits.rate if point.hits else None)

    def ideal(point: PointReport) -> str:
        return _percent(point.hits.ideal_rate if point.hits else None)

    def sent(point: PointReport) -> str:
        counted = point.result.counted
        return "-" if counted is None else f"{counted.get('transfer_bytes_total', 0) / 1e6:.1f}"

    return _table(
        report,
        "prefixes",
        ("hits\n%", hits),
        ("ideal\n%", ideal),
        *_spread("TTFT", lambda summary: summary.ttft, digits=0),
        ("output\ntokens/s", lambda point: f"{point.summary.output_tokens_per_s:.0f}"),
        ("failed", lambda point: str(sum(point.summary.failed.values()))),
        ("sent\nMB", sent),
    )


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f}"


def _spread(name: str, of: Callable[[Summary], Percentiles | None], digits: int = 1) -> list[_Column]:
    """A column of milliseconds for each percentile, the first with the name above it."""

    def column(which: Callable[[Percentiles], float]) -> Callable[[PointReport], str]:
        def cell(point: PointReport) -> str:
            seconds = of(point.summary)
            return "-" if seconds is None else f"{1000 * which(seconds):.{digits}f}"

        return cell

    return [
        (f"{name}\np50", column(lambda seconds: seconds.p50)),
        ("\np90", column(lambda seconds: seconds.p90)),
        ("\np99", column(lambda seconds: seconds.p99)),
    ]


def _table(report: Report, title: str, *columns: _Column) -> Table:
    """A service's name wraps, so that figures are whole in 80 columns."""
    if len({point.label for point in report.points}) > 1:
        columns = ("service", lambda point: point.label), *columns
    headings = ("load", *(heading for heading, _ in columns))
    shown = table(*headings, title=title, words=("service",), folds=True, collapse_padding=True)
    for point in report.by_load:
        shown.add_row(str(point.load), *(cell(point) for _, cell in columns))
    return shown


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
        "prefix_hits": asdict(point.hits) if point.hits else None,
        "counted_by_nodes": point.result.counted,
        "remarks": remarks(point),
        "requests": requests,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n")
