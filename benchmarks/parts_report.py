"""What reports of a step or a chunk, part by part beside limits, have in common: a table, JSON, a figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from benchmarks.decode.workload import ModelFlags
from benchmarks.documents import write_document
from benchmarks.plotting import new_figure
from model.roofline import StepPart

Result = TypeVar("Result")

GIB = 2**30
_WIDE = 10_000
LIMIT = "limit: the larger of bytes at 4.8 TB/s and operations at 800 TFLOP/s (1600 in fp8), part by part"


def print_columns(console: Console, results: Sequence[Result], made: Callable[[Sequence[Result]], Table]) -> None:
    """Tables with a column for each result, as many as the console has room for: it would cut the last ones short.

    made: the table of some results.
    """
    wide = console.options.update(width=_WIDE)

    def fits(count: int) -> bool:
        return Measurement.get(console, wide, made(results[:count])).maximum <= console.width

    count = next((count for count in range(len(results), 1, -1) if fits(count)), 1)
    for first in range(0, len(results), count):
        console.print(made(results[first : first + count]), "")


def what_was_computed(config: ModelFlags, weight_bytes: int) -> str:
    """The model and its formats, in words."""
    layers = "all" if config.layers is None else config.layers
    rank = f"a rank of {config.rank_of}" if config.rank_of > 1 else "one process"
    return (
        f"{config.shape}, {layers} layers, {rank}, weights {config.quantization} ({weight_bytes / GIB:.1f} GiB), "
        f"KV {config.kv_cache_dtype}"
    )


def write_parts(path: Path, schema: int, config: Any, cases: Sequence[Mapping[str, object]]) -> None:
    """The cases as JSON, with the device, the machine and the flags (a dataclass)."""
    content = {
        "schema": schema,
        "device": torch.cuda.get_device_name(),
        "config": {name: str(value) for name, value in asdict(config).items()},
        "cases": cases,
    }
    write_document(path, content)


def draw_parts(path: Path, bars: Mapping[str, Mapping[StepPart, float]], title: str, cases: str, time: str) -> None:
    """Stacked bars by name, of milliseconds by part. cases, time: what the axes show."""
    figure = new_figure(figsize=(max(4.0, 0.8 * len(bars)), 4.2), layout="constrained")
    axis = figure.subplots()
    bottoms = [0.0] * len(bars)
    for part in next(iter(bars.values())):
        heights = [max(0.0, parts[part]) for parts in bars.values()]
        axis.bar(list(bars), heights, bottom=bottoms, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axis.tick_params(axis="x", labelsize="x-small", rotation=45)
    axis.set(title=title, xlabel=cases, ylabel=time)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")
    figure.savefig(path, dpi=130)
