"""What is shown of a run: tables for people, JSON for programs, and a figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.documents import write_document
from benchmarks.machine import this_machine
from benchmarks.plotting import new_figure
from benchmarks.swap_in.launchers import PEER
from benchmarks.swap_in.targets import RESOLVE_ABOVE_FLOOR_US, STATED_FLOOR_US, STATED_US, target
from benchmarks.swap_in.workload import Shape
from benchmarks.tables import table

SCHEMA = 1
_STATED_SHAPE = (2048, 4096, 1152, 1)


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch: inside graph replays, and between two events around one launch."""

    graph_us: float
    single_us: float


@dataclass(frozen=True)
class CaseResult:
    """misses: per request. num_bytes: fetched by a launch. cluster: blocks per request. resolve: without the fetch."""

    batch: int
    misses: int
    num_bytes: int
    cluster: int
    swap_in: Timing
    resolve: Timing
    peer: Timing | None


@dataclass(frozen=True)
class Report:
    """floor_us: a single launch of next to nothing. copy_gb_per_s: of the copy engine over PCIe."""

    results: Sequence[CaseResult]
    shape: Shape
    block_size: int
    device: str
    floor_us: float
    copy_gb_per_s: float
    peer_version: str | None

    def pcie_us(self, result: CaseResult) -> float:
        """What the copy engine would need for the bytes."""
        return result.num_bytes / self.copy_gb_per_s / 1e3

    def stated_us(self, result: CaseResult) -> float | None:
        """The peer's stated figure for a case, if it was stated for this shape."""
        shape = self.shape
        same = (shape.top_k, shape.hot_size, shape.item_bytes, shape.queries) == _STATED_SHAPE
        return STATED_US.get((result.batch, result.misses)) if same else None

    def ratio_to_stated(self, result: CaseResult) -> float | None:
        """How many times faster than the stated figure, had our floor been as high as in that run."""
        stated = self.stated_us(result)
        return None if stated is None else stated / (result.swap_in.single_us - self.floor_us + STATED_FLOOR_US)


def print_report(report: Report, console: Console) -> None:
    """Tables of 80 columns at most, a line per case, and what the columns mean."""
    shape = report.shape
    console.print(
        f"swap-in: top-k {shape.top_k}, {_queries(shape)}{shape.hot_size} hot slots, items of {shape.item_bytes} B, "
        f"{report.block_size} threads per block, {report.device}",
        highlight=False,
    )
    for shown in (_times(report), _beside_stated(report), _beside_peer(report)):
        if shown.row_count:
            console.print(shown, "")
    console.print(
        "graph: in CUDA graph replays; single: between two events, of which "
        f"{report.floor_us:.1f} us are launch and events. resolve: without the fetch, single, less that floor. "
        f"PCIe: what the copy engine needs for the bytes ({report.copy_gb_per_s:.1f} GB/s, measured now). "
        f"stated: SGLang 0.5.23 on an H200 as the design has it, with a floor of {STATED_FLOOR_US:.0f} us; "
        "ratio: stated to single, both with that floor; target: what the ratio is meant to reach.",
        highlight=False,
    )
    console.print(f"{PEER}: {report.peer_version or 'not installed'}", highlight=False)
    console.print(str(this_machine()), highlight=False)


def _queries(shape: Shape) -> str:
    return f"{shape.queries} queries that select {shape.union} positions in all, " if shape.queries > 1 else ""


def _times(report: Report) -> Table:
    shown = _table("us per launch", "blocks", "graph", "single", "resolve", "PCIe", "GB/s")
    for result in report.results:
        ours = result.swap_in
        shown.add_row(
            _case(result),
            str(result.cluster),
            f"{ours.graph_us:.1f}",
            f"{ours.single_us:.1f}",
            f"{result.resolve.single_us - report.floor_us:.1f}",
            f"{report.pcie_us(result):.1f}",
            f"{result.num_bytes / ours.graph_us / 1e3:.1f}",
        )
    return shown


def _beside_stated(report: Report) -> Table:
    """Without rows where nothing was stated for this shape."""
    shown = _table(f"beside {PEER} as stated, us", "stated", "single", "ratio", "target", "")
    for result in report.results:
        stated, ratio = report.stated_us(result), report.ratio_to_stated(result)
        if stated is None or ratio is None:
            continue
        wanted = target(result.batch, result.misses)
        single = f"{result.swap_in.single_us:.1f}"
        verdict = "ok" if ratio >= wanted else "missed"
        shown.add_row(_case(result), f"{stated:.0f}", single, f"{ratio:.2f}", f"{wanted:.2f}", verdict)
    return shown


def _beside_peer(report: Report) -> Table:
    """Without rows where the peer is not installed."""
    title = f"beside {PEER} {report.peer_version}, measured now, us"
    shown = _table(title, "its graph", "its single", "ratio, graph", "ratio, single")
    for result in report.results:
        ours, peer = result.swap_in, result.peer
        if peer is not None:
            ratios = f"{peer.graph_us / ours.graph_us:.2f}", f"{peer.single_us / ours.single_us:.2f}"
            shown.add_row(_case(result), f"{peer.graph_us:.1f}", f"{peer.single_us:.1f}", *ratios)
    return shown


def _table(title: str, *headings: str) -> Table:
    return table("batch x misses", *headings, title=title)


def _case(result: CaseResult) -> str:
    return f"{result.batch} x {result.misses}"


def write_json(path: Path, report: Report) -> None:
    """Everything that was measured, and what it was compared with."""
    cases = [
        {
            **asdict(result),
            "pcie_us": report.pcie_us(result),
            "stated_peer_us": report.stated_us(result),
            "ratio_to_stated": report.ratio_to_stated(result),
        }
        for result in report.results
    ]
    content = {
        "schema": SCHEMA,
        **{key: value for key, value in asdict(report).items() if key != "results"},
        "stated_floor_us": STATED_FLOOR_US,
        "resolve_target_us": RESOLVE_ABOVE_FLOOR_US,
        "cases": cases,
    }
    write_document(path, content)


def write_png(path: Path, report: Report) -> None:
    """Time per launch against misses: a panel per batch, with the PCIe floor."""
    batches = sorted({result.batch for result in report.results})
    columns = min(3, len(batches))
    rows = -(-len(batches) // columns)
    figure = new_figure(figsize=(3.2 * columns, 3.0 * rows + 0.6), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[len(batches) :]:
        axis.set_visible(False)
    for axis, batch in zip(axes, batches, strict=False):
        members = sorted((r for r in report.results if r.batch == batch), key=lambda r: r.misses)
        misses = [r.misses for r in members]
        axis.plot(misses, [r.swap_in.graph_us for r in members], "o-", color="tab:blue", label="in a graph")
        axis.plot(misses, [r.swap_in.single_us for r in members], "o--", color="tab:cyan", label="single launch")
        resolving = [r.resolve.single_us - report.floor_us for r in members]
        axis.plot(misses, resolving, "s-", color="tab:green", label="resolve, less the floor")
        fetching = [r for r in members if r.misses]
        axis.plot(
            [r.misses for r in fetching],
            [report.pcie_us(r) for r in fetching],
            ":",
            color="black",
            label="PCIe, copy engine",
        )
        if stated := [(r.misses, us) for r in members if (us := report.stated_us(r)) is not None]:
            axis.plot(*zip(*stated, strict=True), "x--", color="tab:orange", label=f"{PEER} as stated, single")
        if peers := [(r.misses, r.peer.graph_us) for r in members if r.peer]:
            axis.plot(*zip(*peers, strict=True), "x-", color="tab:red", label=f"{PEER}, in a graph")
        axis.set_xscale("symlog", linthresh=16)
        axis.set_yscale("log")
        axis.set_xticks(misses, [str(count) for count in misses])
        axis.set(xlabel="misses per request", ylabel="us per launch", title=f"batch {batch}", ylim=(1, None))
        axis.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Time of a swap-in launch, {report.device}, items of {report.shape.item_bytes} B")
    figure.savefig(path, dpi=100)
