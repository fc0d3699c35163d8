"""Median latency against context length, one line per method."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine
from benchmarks.plotting import new_figure
from benchmarks.transfer.cases import Case, Group, short
from benchmarks.transfer.methods import CaseResult

_COLOURS = {
    Group.OURS: "tab:blue",
    Group.LARGE: "black",
    Group.PAGE: "tab:orange",
    Group.TOKEN: "tab:red",
    Group.NIXL: "tab:green",
}


def write_png(path: Path, results: Sequence[CaseResult], machine: Machine) -> None:
    """One panel for all cases that differ in tokens only, those with several lengths first."""
    panels: dict[Case, list[CaseResult]] = defaultdict(list)
    for result in results:
        panels[replace(result.case, tokens=1)].append(result)
    lines = [members for members in panels.values() if len(members) > 1] or list(panels.values())
    columns = min(3, len(lines))
    rows = -(-len(lines) // columns)
    figure = new_figure(figsize=(4.2 * columns, 3.8 * rows + 1.0), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    drawn: dict[str, Any] = {}
    for axis, members in zip(axes, lines, strict=False):
        members = sorted(members, key=lambda result: result.case.tokens)
        for group, colour in _COLOURS.items():
            points = [
                (result.case.tokens, 1000 * best.seconds.p50)
                for result in members
                if (best := result.best(group)) is not None
            ]
            if points:
                [drawn[group.label]] = axis.plot(*zip(*points, strict=True), "o-", color=colour)
        case = members[0].case
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="tokens",
            ylabel="ms, median",
            title=f"{case.protocol}, {case.layers} layers x {case.item_bytes} B, pages of {case.page_size}\n"
            f"{case.source} to {case.destination}, {case.concurrency} at once",
        )
        axis.title.set_fontsize("medium")
        axis.set_xticks([result.case.tokens for result in members], [short(r.case.tokens) for r in members])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    for axis in list(axes):
        axis.set_visible(False)
    figure.suptitle(f"Latency of a transfer; lower is better\n{machine}", fontsize="medium")
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
