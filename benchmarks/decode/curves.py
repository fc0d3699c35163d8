"""`python -m benchmarks.decode.curves`: tokens/s over requests, of runs of `benchmarks.decode.in_turns`.

A table and a panel of the figure for each context.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.documents import check_writable
from benchmarks.plotting import new_figure
from benchmarks.program import run
from benchmarks.tables import table

Curve = dict[int, float]
"""Tokens per second of a GPU, by requests."""


def read_curves(paths: list[Path]) -> dict[int, dict[str, Curve]]:
    """By context and the way that KV is held: all that the files say, the later file last.

    Raises StartupError for a file of something else.
    """
    curves: defaultdict[int, dict[str, Curve]] = defaultdict(dict)
    for path in paths:
        try:
            document = json.loads(path.read_text())
            flags = document["config"]
            if not document["cases"]:
                raise ValueError("no cases")
            for case in document["cases"]:
                tokens = case["batch"] * (1 + int(flags["speculative_num_steps"]))
                curve = curves[int(flags["context"])].setdefault(case["way"], {})
                curve[case["batch"]] = tokens / statistics.median(case["step_ms"]) * 1e3
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError) as error:
            raise StartupError(f"{path}: no figures of benchmarks.decode.in_turns: {error!r}") from error
    return dict(sorted(curves.items()))


def main(
    files: Annotated[list[Path], typer.Argument(help="What --json of benchmarks.decode.in_turns has written.")],
    png: Annotated[Path, typer.Option(help="Where to draw the figure.")] = Path("bench-decode-requests.png"),
) -> None:
    check_writable(png)
    curves = read_curves(files)
    figure = new_figure(figsize=(4 * len(curves), 3.2), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for panel, (context, ways) in zip(panels, curves.items(), strict=True):
        shown = table("requests", *ways, title=f"{context} tokens a request, tokens/s")
        for batch in sorted({batch for curve in ways.values() for batch in curve}):
            rates = (curve.get(batch) for curve in ways.values())
            shown.add_row(str(batch), *("does not fit" if rate is None else f"{rate:.0f}" for rate in rates))
        Console().print(shown, "")
        for way, curve in ways.items():
            panel.plot(sorted(curve), [curve[batch] for batch in sorted(curve)], marker="o", label=way)
        panel.set_title(f"{context // 1024}K tokens a request")
        panel.set_xlabel("requests")
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0].set_ylabel("tokens/s of a GPU")
    panels[0].set_ylim(bottom=0)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    run(main)
