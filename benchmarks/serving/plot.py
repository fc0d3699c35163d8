"""What more clients bring, and what they cost, one line per service."""

from pathlib import Path

from benchmarks.plotting import new_figure
from benchmarks.serving.load import Closed
from benchmarks.serving.report import Report


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
