"""What a prefix cache brings: times to first token, tokens that were found, and bytes that were sent."""

from pathlib import Path

import numpy as np

from benchmarks.plotting import new_figure
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
