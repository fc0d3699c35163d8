"""`python -m benchmarks.top_k`: the top-k kernel of csrc/ beside torch.topk and what HBM allows."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.device import need_cuda
from benchmarks.graph_timing import copy_gb_per_s, median_us
from benchmarks.program import run
from benchmarks.tables import table

TOPK = 2048
DECODE = ((1, 8), (1, 32), (1, 128), (1, 1024), (16, 32), (16, 64), (16, 128), (64, 32), (128, 64))
"""Rows and 1024 scores in each, like the next."""
PROMPT = ((4096, 4), (2048, 8), (512, 32), (128, 128), (2048, 32), (1024, 128))
"""The first four are what a prompt's scores are cut into; the last two show the limit."""

Select = Callable[[torch.Tensor, int], object]
"""Finds the k largest of each row of scores."""


@dataclass(frozen=True)
class CaseResult:
    """Medians in microseconds by who selects. hbm_us: reading the scores once at a copy's speed. swept: of our kernels,
    by threads of a block and blocks per row.
    """

    rows: int
    width: int
    hbm_us: float
    us: dict[str, float]
    swept: dict[str, float]

    @property
    def shape(self) -> str:
        return f"{self.rows} x {self.width >> 10}K"


def main(
    beside: Annotated[
        list[str], typer.Option(help="module:function of (scores, k) to time beside; may be repeated.")
    ] = [],  # noqa: B006
    sweep: Annotated[bool, typer.Option(help="Also time each number of blocks per row.")] = False,
) -> None:
    """Time all within CUDA graphs, on normally distributed scores."""
    need_cuda("the top-k benchmark")
    # Here, since a machine without CUDA need not have what compiles csrc/.
    from kernels.top_k import top_positions

    torch.set_default_device("cuda")
    selects: dict[str, Select] = {"torch": lambda scores, k: scores.topk(k, sorted=False), "ours": top_positions}
    selects |= {name.rpartition(":")[2]: _imported(name) for name in beside}
    bytes_per_us = copy_gb_per_s() * 1e3
    results = []
    for rows, width in ((rows, k << 10) for rows, k in (*DECODE, *PROMPT)):
        scores = torch.randn(rows, width)
        us = {name: select_us(select, scores) for name, select in selects.items()}
        swept = {name: select_us(select, scores) for name, select in geometries(rows, width)} if sweep else {}
        results.append(CaseResult(rows, width, scores.nbytes / bytes_per_us, us, swept))
    print_results(results, Console())


def _imported(name: str) -> Select:
    module, _, function = name.partition(":")
    try:
        select: Select = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise StartupError(f"--beside {name}: expected module:function, {error}") from error
    return select


def geometries(rows: int, width: int) -> Iterator[tuple[str, Select]]:
    """Launches with each number of blocks per row, by name: threads of a block x blocks."""
    from kernels.top_k import Geometry, on_device

    kernels = on_device(torch.device("cuda", torch.cuda.current_device()))
    for kernel in kernels.specializations:
        for cluster in kernels.running:
            if cluster <= kernel.max_cluster and kernels.running[cluster]:
                geometry = Geometry(kernel, cluster, kernel.kept_of(width, cluster))

                def select(scores: torch.Tensor, k: int, geometry: Geometry = geometry) -> None:
                    positions = torch.empty(len(scores), k, dtype=torch.int64)
                    kernels.launch(scores, None, positions, geometry)

                yield f"{kernel.block_size}x{cluster}", select


def select_us(select: Select, scores: torch.Tensor) -> float:
    """Microseconds of one call."""
    return median_us(lambda _: select(scores, TOPK), turns=max(2, min(20, (256 << 20) // scores.nbytes)))


def print_results(results: list[CaseResult], console: Console) -> None:
    """A line per case, and what the columns mean."""
    shown = table("rows x width", "HBM", *results[0].us, "torch/ours", "HBM/ours")
    for result in results:
        ours = result.us["ours"]
        times = [f"{us:.1f}" for us in (result.hbm_us, *result.us.values())]
        shown.add_row(result.shape, *times, f"{result.us['torch'] / ours:.1f}", f"{result.hbm_us / ours:.0%}")
    console.print(shown)
    for result in results:
        if result.swept:
            swept = ", ".join(f"{name} {us:.1f}" for name, us in result.swept.items())
            console.print(f"{result.shape}, threads x blocks per row: {swept}", highlight=False)
    console.print(
        f"Microseconds, medians in CUDA graphs; k {TOPK}, float32 scores, whole rows. HBM: reading the scores once at "
        f"the speed of a copy of 1 GiB. What fits the L2 cache is read from there. {torch.cuda.get_device_name()}",
        highlight=False,
    )


if __name__ == "__main__":
    run(main)
