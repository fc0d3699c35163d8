"""What was measured, as a table, JSON and a figure."""

import json
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode.config import DecodeBench
from benchmarks.decode.limits import Works
from benchmarks.decode.timing import Part, StepTiming
from benchmarks.machine import this_machine
from benchmarks.plotting import new_figure

SCHEMA = 1
_GIB = 2**30


@dataclass(frozen=True)
class CaseResult:
    """One batch with so many new positions a step and layer. kv_bytes: hot slots in HBM, without keys and tables.

    work: of each part, of which `link_gb_per_s` says what the link takes.
    """

    batch: int
    new_positions: int
    kv_bytes: int
    timing: StepTiming
    work: Works
    link_gb_per_s: float

    def limit_ms(self, part: Part) -> float:
        """What the hardware takes for a part at least."""
        return sum(work.ms(self.link_gb_per_s) for work in self.work[part])

    @property
    def limit(self) -> float:
        """Milliseconds that the hardware takes at least for the step."""
        return sum(map(self.limit_ms, Part))


def print_results(results: list[CaseResult], config: DecodeBench, weight_bytes: int, console: Console) -> None:
    """A line for each case, then the parts of each beside their limits."""
    steps = _table("steps", "batch", "new", "ms", "limit", "ratio", "tokens/s", "kernels", "misses", "hot GiB")
    for result in results:
        timing = result.timing
        steps.add_row(
            str(result.batch),
            str(result.new_positions),
            f"{timing.median_ms:.2f}",
            f"{result.limit:.2f}",
            f"{timing.median_ms / result.limit:.2f}",
            f"{result.batch / timing.median_ms * 1e3:.0f}",
            f"{sum(count for _, count in timing.kernels.values()):.0f}",
            f"{timing.misses:.0f}",
            f"{result.kv_bytes / _GIB:.1f}",
        )
    console.print(steps, "")
    parts = _table("parts, ms / limit", "part", *(f"{r.batch} x {r.new_positions}" for r in results))
    for part in Part:
        parts.add_row(part, *(f"{r.timing.parts[part]:.2f}/{r.limit_ms(part):.2f}" for r in results))
    console.print(parts, "")
    layers = "all" if config.layers is None else config.layers
    rank = f"a rank of {config.rank_of}" if config.rank_of > 1 else "one process"
    console.print(
        f"{config.shape}, {layers} layers, {rank}, weights {config.quantization} ({weight_bytes / _GIB:.1f} GiB), KV "
        f"{config.kv_cache_dtype}, {config.context} tokens a request, {torch.cuda.get_device_name()}. ms: median of "
        "replayed graphs, by the host's clock. limit: the larger of bytes at 4.8 TB/s and operations at 800 TFLOP/s "
        "(1600 in fp8), part by part, and missed bytes over PCIe at the rate of this run "
        f"({results[0].link_gb_per_s:.1f} GB/s). rest: norms, rotation, encoding, storing, time between kernels.",
        highlight=False,
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def write_json(results: list[CaseResult], config: DecodeBench) -> None:
    """Everything that was measured so far."""
    document = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(),
        "machine": asdict(this_machine()),
        "config": {name: str(value) for name, value in asdict(config).items()},
        "cases": [
            {
                **asdict(result),
                "parts_ms": result.timing.parts,
                "limits_ms": {part: result.limit_ms(part) for part in Part},
            }
            for result in results
        ],
    }
    config.json.write_text(json.dumps(document, indent=1) + "\n")


def write_png(results: list[CaseResult], config: DecodeBench) -> None:
    """Stacked bars of where a step's time goes, beside what the hardware takes for it."""
    figure = new_figure(figsize=(max(4.0, 1.6 * len(results)), 4.2), layout="constrained")
    axis = figure.subplots()
    names = [f"{r.batch} x {r.new_positions}{what}" for r in results for what in ("", "\nlimit")]
    bottoms = [0.0] * len(names)
    for part in Part:
        pairs = ((max(0.0, r.timing.parts[part]), r.limit_ms(part)) for r in results)
        heights = [height for pair in pairs for height in pair]
        axis.bar(names, heights, bottom=bottoms, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axis.tick_params(axis="x", labelsize="x-small", rotation=45)
    axis.set_ylabel("ms per decode step (batch x new positions)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")
    figure.savefig(config.png, dpi=130)
