"""What was measured, as tables, JSON and a figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.parts_report import GIB, LIMIT, draw_parts, print_columns, what_was_computed, write_parts
from benchmarks.prefill.config import PrefillBench
from benchmarks.prefill.timing import PARTS, ChunkTiming
from benchmarks.tables import table
from model.roofline import StepPart, Works

SCHEMA = 1
_SHOWN = 12
_NAME = 44


@dataclass(frozen=True)
class CaseResult:
    """The last `chunk` tokens of a prompt of `context` tokens, and the work of each part."""

    context: int
    chunk: int
    timing: ChunkTiming
    work: Works

    def limit_ms(self, part: StepPart) -> float:
        """What the hardware takes for a part at least."""
        return sum(work.ms(1.0) for work in self.work[part])

    @property
    def limit(self) -> float:
        """Milliseconds that the hardware takes at least for the chunk."""
        return sum(map(self.limit_ms, PARTS))

    @property
    def tokens_per_s(self) -> float:
        return self.chunk / self.timing.median_ms * 1e3


def print_results(results: list[CaseResult], config: PrefillBench, weight_bytes: int, console: Console) -> None:
    """A line for each case, the parts of each beside their limits, and the longest kernels of the last case."""
    chunks = table("context", "ms", "limit", "of limit", "tokens/s", "kernels", "peak GiB", title="chunks")
    for result in results:
        timing = result.timing
        chunks.add_row(
            str(result.context),
            f"{timing.median_ms:.1f}",
            f"{result.limit:.1f}",
            f"{100 * result.limit / timing.median_ms:.0f}%",
            f"{result.tokens_per_s:.0f}",
            str(sum(kernel.count for kernel in timing.kernels)),
            f"{timing.peak_bytes / GIB:.1f}",
        )
    console.print(chunks, "")
    print_columns(console, results, _parts)
    kernels = table("ms", "number", "part", "kernel", title=f"kernels at {results[-1].context} tokens of context")
    for kernel in results[-1].timing.kernels[:_SHOWN]:
        kernels.add_row(f"{kernel.ms:.1f}", str(kernel.count), kernel.part, _short(kernel.name))
    console.print(kernels, "")
    console.print(
        f"{what_was_computed(config, weight_bytes)}, chunks of {config.chunked_prefill_size} tokens, "
        f"{torch.cuda.get_device_name()}. context: tokens of the prompt, of which the chunk is the last. ms: median of "
        f"{config.passes} forward passes, not recorded, by the host's clock. {LIMIT}. experts: from router to sum. "
        "rest: norms, rotation, encoding, storing, copies, time between kernels. The last layer, or the draft layer if "
        "it is computed, only stores KV.",
        highlight=False,
    )


def _parts(results: Sequence[CaseResult]) -> Table:
    parts = table("part", *(str(result.context) for result in results), title="parts, ms / limit")
    for part in PARTS:
        parts.add_row(part, *(f"{r.timing.parts[part]:.1f}/{r.limit_ms(part):.1f}" for r in results))
    return parts


def _short(name: str) -> str:
    """A kernel's name without its return type and what it is made for, as far as there is room."""
    name = name.removeprefix("void ")
    return name if len(name) <= _NAME else f"{name[: _NAME - 2]}.."


def write_json(results: list[CaseResult], config: PrefillBench) -> None:
    """Everything that was measured so far."""
    cases = [
        {
            **asdict(result),
            "median_ms": result.timing.median_ms,
            "tokens_per_s": result.tokens_per_s,
            "parts_ms": result.timing.parts,
            "limits_ms": {part: result.limit_ms(part) for part in PARTS},
        }
        for result in results
    ]
    write_parts(config.json, SCHEMA, config, cases)


def write_png(results: list[CaseResult], config: PrefillBench) -> None:
    """Stacked bars of where a chunk's time goes, beside what the hardware takes for it."""
    bars: dict[str, dict[StepPart, float]] = {}
    for result in results:
        bars[str(result.context)] = result.timing.parts
        bars[f"{result.context}\nlimit"] = {part: result.limit_ms(part) for part in PARTS}
    title = f"A chunk of {config.chunked_prefill_size} tokens of {config.shape}, by part"
    draw_parts(config.png, bars, title, "tokens of the prompt up to the end of the chunk", "ms per chunk")
