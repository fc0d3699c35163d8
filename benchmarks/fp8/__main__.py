"""`python -m benchmarks.fp8`: products of block-fp8 weights beside torch's and beside the limit of the hardware.

Medians of CUDA graph replays. Each turn of a graph has weights of its own, more in all than the device caches, as one
layer after another does. The limit is the larger of the time to read the weights and the activations once, at the
memory's rate, and of the operations, at the tensor cores'. `--sweep` times every way to cut the products instead.
"""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.device import need_cuda
from benchmarks.documents import check_writable, write_document
from benchmarks.fp8.layers import BYTES_PER_US, LINEAR, OPERATIONS_PER_US, RANKS, Result, expert_results, linear_results
from benchmarks.fp8.sweep import sweep_experts, sweep_linear, sweep_prefill
from benchmarks.program import run
from benchmarks.tables import table

SCHEMA = 1


class Sweep(StrEnum):
    """What to cut in every way."""

    LINEAR = "linear"
    EXPERTS = "experts"
    PREFILL = "prefill"


_SWEEPS = {Sweep.LINEAR: sweep_linear, Sweep.EXPERTS: sweep_experts, Sweep.PREFILL: sweep_prefill}


def main(
    only: Annotated[str, typer.Option(help="Part of the names of the layers to time; 'experts' for these.")] = "",
    sweep: Annotated[Sweep | None, typer.Option(help="Time ways to cut the products.")] = None,
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-fp8.json"),
) -> None:
    """Time products of block-fp8 weights."""
    need_cuda("the fp8 benchmark")
    check_writable(json_path)
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    console = Console()
    if sweep is not None:
        _SWEEPS[sweep](console)
        return
    linear = [result for name, shape in LINEAR.items() if only in name for result in linear_results(name, *shape)]
    if linear:
        print_results(linear, console)
    experts = list(expert_results()) if only in "experts" else []
    if experts:
        print_results(experts, console)
    content = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(),
        "results": [asdict(result) for result in linear + experts],
    }
    write_document(json_path, content, indent=2)


def print_results(results: list[Result], console: Console) -> None:
    """A line per result, and what the columns mean."""
    ways = list(results[0].us)
    shown = table("", "tokens", *ways, "limit", "ratio", words=("",))
    for result in results:
        cells = (*(f"{us:.1f}" for us in result.us.values()), f"{result.limit:.1f}")
        shown.add_row(result.name, str(result.tokens), *cells, f"{result.us[ways[0]] / result.limit:.2f}")
    console.print(shown)
    console.print(
        "us; quantised: of tokens that are quantised already; layer: a mixture of experts of a rank, from the norm and "
        f"choice of its tokens to the sums of those of {RANKS} ranks, tokens counted over the group, no collectives. "
        "ratio: of the first column to the limit, at "
        f"{BYTES_PER_US / 1e6} TB/s and {OPERATIONS_PER_US / 1e6:.0f} TFLOP/s. {torch.cuda.get_device_name()}",
        highlight=False,
    )


if __name__ == "__main__":
    run(main)
