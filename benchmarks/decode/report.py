"""What was measured, as a table, JSON and a figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode.config import DecodeBench
from benchmarks.decode.timing import StepTiming, describe_filling
from benchmarks.parts_report import LIMIT, draw_parts, print_columns, what_was_computed, write_parts
from benchmarks.tables import table
from model.roofline import StepPart, Works

SCHEMA = 2


@dataclass(frozen=True)
class CaseResult:
    """One batch and what it selects. kv_bytes: hot slots and index keys in HBM. buffer: hot slots of a
    request that is not whole in HBM. whole: how many requests are.

    work: of each part, of which `link_gb_per_s` says what the link takes.
    """

    batch: int
    selections: str
    kv_bytes: int
    buffer: int
    whole: int
    timing: StepTiming
    work: Works
    link_gb_per_s: float

    def limit_ms(self, part: StepPart) -> float:
        """What the hardware takes for a part at least."""
        return sum(work.ms(self.link_gb_per_s) for work in self.work[part])

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.selections}"

    @property
    def limit(self) -> float:
        """Milliseconds that the hardware takes at least for the step."""
        return sum(map(self.limit_ms, StepPart))


def print_results(results: list[CaseResult], config: DecodeBench, weight_bytes: int, console: Console) -> None:
    """A line for each case, then the parts of each beside their limits."""
    steps = table(
        "batch", "new", "ms", "limit", "ratio", "tokens/s", "kernels", "misses", "buffer", "whole", title="steps"
    )
    for result in results:
        timing = result.timing
        steps.add_row(
            str(result.batch),
            result.selections,
            f"{timing.median_ms:.2f}",
            f"{result.limit:.2f}",
            f"{timing.median_ms / result.limit:.2f}",
            f"{result.batch / timing.median_ms * 1e3:.0f}",
            f"{sum(count for _, count in timing.kernels.values()):.0f}",
            f"{timing.misses:.0f}",
            str(result.buffer),
            str(result.whole),
        )
    console.print(steps, "")
    for result in results:
        if filling := describe_filling(result.timing.filling_ms):
            console.print(f"{result.name}: {filling}", highlight=False)
    print_columns(console, results, _parts)
    console.print(
        f"{what_was_computed(config, weight_bytes)}, {config.context} tokens a request, "
        f"{torch.cuda.get_device_name()}. ms: median of "
        f"replayed graphs, by the host's clock. {LIMIT}, and missed bytes over PCIe at the rate of this run "
        f"({results[0].link_gb_per_s:.1f} GB/s). misses: of a token and index layer. "
        "buffer: hot slots of a request; whole: requests of which all KV is in HBM. "
        "rest: norms, rotation, encoding, storing, time between kernels.",
        highlight=False,
    )


def _parts(results: Sequence[CaseResult]) -> Table:
    parts = table("part", *(r.name for r in results), title="parts, ms / limit")
    for part in StepPart:
        parts.add_row(part, *(f"{r.timing.parts[part]:.2f}/{r.limit_ms(part):.2f}" for r in results))
    return parts


def write_json(results: list[CaseResult], config: DecodeBench) -> None:
    """Everything that was measured so far."""
    cases = [
        {
            **asdict(result),
            "parts_ms": result.timing.parts,
            "limits_ms": {part: result.limit_ms(part) for part in StepPart},
        }
        for result in results
    ]
    write_parts(config.json, SCHEMA, config, cases)


def write_png(results: list[CaseResult], config: DecodeBench) -> None:
    """Stacked bars of where a step's time goes, beside what the hardware takes for it."""
    bars: dict[str, dict[StepPart, float]] = {}
    for result in results:
        bars[result.name] = result.timing.parts
        bars[f"{result.name}\nlimit"] = {part: result.limit_ms(part) for part in StepPart}
    title = f"A decode step of {config.shape} with {config.context} tokens a request, by part"
    draw_parts(
        config.png, bars, title, "requests x new positions of a token and layer, or its selections", "ms per step"
    )
