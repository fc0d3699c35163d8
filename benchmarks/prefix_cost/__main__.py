"""`python -m benchmarks.prefix_cost`: what a prefix cache brings and what it costs, one service with it, one without.

Both run at the same time on this machine and are asked in turns, so what else the machine does meets both.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from base.errors import StartupError
from benchmarks.documents import check_writable
from benchmarks.prefix_cost.measure import CostPlan, measure
from benchmarks.prefix_cost.report import print_costs, write_json
from benchmarks.program import run
from benchmarks.serving.services import check_labels, context_length, variant, vocab_size
from model.tiny import write_tiny_checkpoint

_ANSWER_TOKENS = 8
"""Room for the longest answer."""


def main(
    serve_flags: Annotated[list[str] | None, typer.Argument(help="After --: flags of both services.")] = None,
    model_path: Annotated[Path | None, typer.Option(help="Checkpoint; default: a tiny random one.")] = None,
    on: Annotated[str, typer.Option("--on", help="Flags of the service with a cache, or LABEL=FLAGS.")] = "on=",
    off: Annotated[
        str, typer.Option("--off", help="Flags of the service without one.")
    ] = "off=--no-enable-prefix-caching",
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Of prompts whose first token is timed.")] = 8192,
    shared: Annotated[float, typer.Option(min=0.0, max=1.0, help="Part of them that was seen before.")] = 0.95,
    rounds: Annotated[int, typer.Option(min=0, help="Such prompts to each service; 0: none.")] = 5,
    pair_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of prompts that share nothing.")] = 1024,
    pairs: Annotated[int, typer.Option(min=0, help="Such prompts to each service; 0: none.")] = 300,
    timeout: Annotated[float, typer.Option(help="Seconds for an answer.")] = 600.0,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write every figure.")] = Path(
        "bench-prefix-cost.json"
    ),
) -> None:
    """Time first tokens with and without a cached prefix, and processor time of prompts that share nothing."""
    check_writable(json_path)
    # More threads would slow down a small model.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shared_tokens = min(prompt_tokens - 1, round(shared * prompt_tokens))
    plan = CostPlan(prompt_tokens, shared_tokens, rounds, pair_tokens, pairs)
    context = plan.longest + _ANSWER_TOKENS
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-prefix-cost-") as directory:
        if model_path is None:
            model_path = Path(directory)
            write_tiny_checkpoint(model_path, "deepseek_v32", seed=1, max_position_embeddings=context)
        if context_length(model_path) < context:
            raise StartupError(f"{model_path} takes {context_length(model_path)} tokens; {context} are needed")
        with_cache, without = (variant(words, model_path, serve_flags or ()) for words in (on, off))
        check_labels((with_cache, without))
        with Progress(console=Console(stderr=True), refresh_per_second=1) as bar:
            task = bar.add_task("", total=2 * (rounds + pairs))
            report = measure(
                with_cache, without, plan, vocab_size(model_path), timeout, progress=lambda: bar.advance(task)
            )
    print_costs(report, Console(highlight=False))
    write_json(json_path, report)


if __name__ == "__main__":
    run(main)
