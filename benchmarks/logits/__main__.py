"""`python -m benchmarks.logits`: how far logits are from float32, beside a plain computation in the same types.

Random models of 4 layers with the heads, items and index keys of published ones, weights in block-fp8. Three
computations of the same texts: in float32, with the weights dequantised; in the published arithmetic in plain torch
(`benchmarks.logits.plain`); and as they are served, prompt and decode steps. A text of at most top-k tokens is
attended to as a whole, so it compares arithmetic alone. In a longer one each computation selects for itself, and
positions at the border differ.
"""

from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from base.errors import StartupError
from benchmarks.logits.checkpoint import PublishedShape
from benchmarks.logits.compare import STEPS, compare
from benchmarks.machine import this_machine
from benchmarks.program import run
from service.node_model import use_device

_MOST = 1.1


def main(
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="May be repeated; default: all.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=sum(STEPS) + 1, help="Of a text; may be repeated; default: 2048, 4096.")
    ] = None,
    device: Annotated[str, typer.Option(help="With a CPU, weights are dequantised as they are loaded.")] = "cuda",
) -> None:
    """Compare logits with those in float32."""
    where = use_device(device)
    known: tuple[PublishedShape, ...] = get_args(PublishedShape)
    if unknown := set(shapes or ()).difference(known):
        raise StartupError(f"--shape {' '.join(unknown)}: expected {' or '.join(known)}")
    console = Console()
    table = Table(
        *("shape", "KV", "tokens", "selected", "mean: plain", "ours", "p99: plain", "ours", "worst"),
        title="|logit - logit in float32| / rms of logits",
        box=None,
    )
    worst = 0.0
    for shape in known:
        if shapes and shape not in shapes:
            continue
        for result in compare(shape, tokens or [2048, 4096], where):
            distances = (result.plain.mean, result.ours.mean, result.plain.p99, result.ours.p99)
            table.add_row(
                shape,
                result.kv_cache_dtype.removesuffix("_e4m3"),
                str(result.tokens),
                "all" if result.all_selected else "each its own",
                *(f"{distance / result.scale:.4f}" for distance in distances),
                f"{result.worst:.3f}",
            )
            worst = max(worst, result.worst)
    console.print(table)
    console.print(f"worst: ours / plain, of mean and p99; at most {_MOST} is meant to be. Here: {worst:.3f}.")
    console.print(str(this_machine()), highlight=False)


if __name__ == "__main__":
    run(main)
