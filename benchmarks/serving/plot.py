"""Figures: what more clients bring and what they cost, one line per service, and what a prefix cache brings."""

from pathlib import Path

import numpy as np

from benchmarks.plotting import new_figure
from benchmarks.serving.load import Closed
from benchmarks.serving.metrics import Answered
from benchmarks.serving.report import PointReport, Report

_IDEAL = "0.75"


def write_prefix_png(path: Path, report: Report) -> None:
    """Shares of requests by TTFT, hit rates beside the ideal ones, and KV that was sent, where that is known."""
    points = [point for point in report.by_load if point.summary.answered]
    figure = new_figure(figsize=(12.0, 4.4), layout="constrained")
    times, hits, sent = figure.subplots(1, 3)
    names = [_name(point, report) for point in points]
    for number, (name, point) in enumerate(zip(names, points, strict=True)):
        answered = (Answered(outcome) for outcome in point.result.outcomes if outcome.failure is None)
        ttft = sorted(1000 * each.ttft for each in answered)
        times.plot(ttft, np.arange(1, len(ttft) + 1) / len(ttft), color=f"C{number}", label=name)
        ideal, found = (point.hits.ideal_rate, point.hits.rate) if point.hits else (None, None)
        hits.bar(number, 100 * (ideal or 0), color=_IDEAL, width=0.8, label="" if number else "ideal")
        hits.bar(number, 100 * (found or 0), color=f"C{number}", width=0.5)
        counted = point.result.counted
        if counted is not None:
            sent.bar(number, counted.get("transfer_bytes_total", 0.0) / 1e6, color=f"C{number}", width=0.5)
    times.set(xlabel="time to first token, ms", title="requests, by time to first token", xscale="log", ylim=(0, 1))
    hits.margins(y=0.2)  # for the legend
    hits.set(title="cached tokens, % of prompt tokens", ylim=(0, None))
    sent.set(title="KV written by prefill nodes, MB", ylim=(0, None))
    for axis in (hits, sent):
        axis.set_xticks(range(len(names)), names, rotation=20)
    for axis in (times, hits, sent):
        axis.grid(alpha=0.3)
    for axis in (times, hits):
        if points:
            axis.legend(fontsize="small")
    figure.suptitle(f"client: {report.machine}", fontsize="small")
    figure.savefig(path, dpi=130)


def _name(point: PointReport, report: Report) -> str:
    loads = {each.load for each in report.points}
    return point.label if len(loads) == 1 else f"{point.label}, {point.load}"


def write_png(path: Path, report: Report) -> None:
    """Output tokens per second and the time between tokens, against load."""
    # Loads lie apart evenly: they are mostly powers of two, and one may be infinite.
    place = {load: number for number, load in enumerate(dict.fromkeys(point.load for point in report.points))}
    figure = new_figure(figsize=(10.5, 4.4), layout="constrained")
    rates, gaps = figure.subplots(1, 2)
    for number, label in enumerate(dict.fromkeys(point.label for point in report.points)):
        points = [point for point in report.points if point.label == label]
        colour = f"C{number}"
        tokens = [point.summary.output_tokens_per_s for point in points]
        rates.plot([place[point.load] for point in points], tokens, "o-", color=colour, label=label)
        timed = [(place[point.load], point.summary.itl) for point in points if point.summary.itl]
        places = [at for at, _ in timed]
        gaps.plot(places, [1000 * itl.p50 for _, itl in timed], "o-", color=colour, label=f"{label}, p50")
        gaps.plot(places, [1000 * itl.p99 for _, itl in timed], "^--", color=colour, label=f"{label}, p99")
    closed = all(isinstance(load, Closed) for load in place)
    for axis, title in ((rates, "output tokens per second"), (gaps, "time between tokens, ms")):
        axis.set_xticks(list(place.values()), [str(load) for load in place])
        axis.set(xlabel="requests at a time" if closed else "requests per second", title=title, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(f"client: {report.machine}", fontsize="small")
    figure.savefig(path, dpi=130)
