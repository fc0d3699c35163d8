"""`python -m benchmarks.passkey`: how many pass keys in long texts a service finds.

Of a service that runs, or of the trained model served here, once for each `--variant`. This shows what precisions, KV
formats and sizes of the hot buffer do to answers.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from base.errors import StartupError
from benchmarks.flags import parse_numbers
from benchmarks.machine import this_machine
from benchmarks.passkey import CHECKPOINT
from benchmarks.passkey.exam import Marked, examine, questions
from benchmarks.program import run
from benchmarks.serving.config import ServingBench
from benchmarks.serving.services import Service, check_labels, remote, variant
from benchmarks.tables import table

_SHOWN = 5
"""Wrong answers of a service that are quoted."""


def main(
    serve_flags: Annotated[list[str] | None, typer.Argument(help="After --: flags of `hisparse-pd serve`.")] = None,
    base_urls: Annotated[
        list[str] | None,
        typer.Option("--base-url", help="http://HOST:PORT or LABEL=URL of a service that runs; repeated."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its model; default: the only one.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key for --base-url.", envvar="OPENAI_API_KEY")] = None,
    model_path: Annotated[Path, typer.Option(help="Checkpoint to serve here; default: the trained one.")] = CHECKPOINT,
    variants: Annotated[
        list[str] | None,
        typer.Option("--variant", help="Further flags of `serve`, quoted, or LABEL=FLAGS; repeated."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, separated by commas.")] = "1024,4096,8192",
    count: Annotated[int, typer.Option(min=1, help="Questions of each length.")] = 20,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions under way.")] = 4,
    seed: Annotated[int, typer.Option(help="Another one gives other questions.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for an answer.")] = 600.0,
) -> None:
    """Ask for pass keys in long texts and print how many are found."""
    if base_urls and (serve_flags or variants or model_path != CHECKPOINT):
        raise StartupError("--variant, --model-path and flags of serve: for services that are started here")
    services: list[Service]
    if base_urls:
        services = [remote(word, ServingBench(model=model, api_key=api_key)) for word in base_urls]
    else:
        # More threads would slow down a small model.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        services = [variant(words, model_path, serve_flags or ()) for words in variants or [""]]
    check_labels(services)
    for service in services:
        service.check()
    asked = questions(parse_numbers("--lengths", [lengths]), count, seed)
    marked: dict[str, list[Marked]] = {}
    with Progress(console=Console(stderr=True), refresh_per_second=2) as bar:
        task = bar.add_task("", total=len(services) * len(asked))
        for service in services:
            bar.update(task, description=service.label)
            with service.running() as endpoint:
                marked[service.label] = asyncio.run(
                    examine(endpoint, asked, concurrency, timeout, progress=lambda: bar.advance(task))
                )
    report(marked, Console(highlight=False))


def report(marked: Mapping[str, Sequence[Marked]], console: Console) -> None:
    """Right answers by service and length, and some of the wrong ones."""
    console.print("pass keys found, by tokens of the prompt", style="bold")
    lengths = sorted({one.length for answers in marked.values() for one in answers})
    shown = table("service", *map(str, lengths), words=("service",), folds=True)
    for label, answers in marked.items():
        by_length = groupby(sorted(answers, key=lambda one: one.length), key=lambda one: one.length)
        groups = [list(group) for _, group in by_length]
        shown.add_row(label, *(f"{sum(one.is_right for one in group)} of {len(group)}" for group in groups))
    console.print(shown, "")
    for label, answers in marked.items():
        for one in [one for one in answers if not one.is_right][:_SHOWN]:
            console.print(
                f"{label}: {one.length} tokens, {one.question.word}: {one.question.key}, answered {one.answer!r}"
            )
    console.print(f"client: {this_machine()}")


if __name__ == "__main__":
    run(main)
