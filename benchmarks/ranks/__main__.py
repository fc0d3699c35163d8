"""`python -m benchmarks.ranks`: agreement, collectives and steps of a group of ranks on this machine."""

import os
import subprocess
import sys
import threading
from dataclasses import astuple, replace
from typing import Annotated

import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.workload import build_model
from benchmarks.program import run
from benchmarks.ranks.agreement import summary, time_agreement
from benchmarks.ranks.exchange import time_exchange
from benchmarks.ranks.host_reads import time_host_reads
from benchmarks.ranks.prompts import models_of, time_prompt_of
from benchmarks.ranks.steps import time_steps_of
from benchmarks.tables import table
from cli.serve import die_with_parent
from ranks.group import RankGroup
from ranks.place import RankPlace, create_places
from service.node_model import use_device

_STEP_TIMEOUT_S = 300.0
_HOST_READS = ("swap-in alone", "together", "copy alone", "together")
"""Headings of the fields of HostReadRates."""


def main(
    ranks: Annotated[int, typer.Option(help="Processes, on GPUs with one each.", min=2)] = 2,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    layers: Annotated[
        int, typer.Option(help="Of DeepSeek-V3.2, the first three without experts; 0: no steps.", min=0)
    ] = 5,
    context: Annotated[int, typer.Option(help="Tokens of each request, all in HBM.", min=1)] = 4096,
    batch: Annotated[list[int], typer.Option(help="Requests at each rank; may be repeated.", min=1)] = [1, 16, 64],  # noqa: B006
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt that the group prefills; 0: none.", min=0)] = 0,
    chunk: Annotated[list[int], typer.Option(help="Tokens of its chunks; may be repeated.", min=1)] = [2048, 8192],  # noqa: B006
) -> None:
    """Time what ranks do together. Steps and collectives are replayed graphs on GPUs."""
    place = RankPlace.taken()
    if place is not None:
        _measure(place, device, layers, context, batch, prompt, chunk)
        return
    if device != "cpu" and torch.cuda.device_count() < ranks:
        raise StartupError(f"{ranks} ranks need a GPU each, and this machine has {torch.cuda.device_count()}")
    places = create_places(ranks)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", *sys.argv[1:]],
            env={**os.environ, **place.variables()},
            pass_fds=place.descriptors,
            preexec_fn=die_with_parent,
            start_new_session=True,  # Ctrl-C is for this process, which ends them
        )
        for place in places
    ]
    try:
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise StartupError(f"ranks ended with {codes}")


def _measure(
    place: RankPlace, kind: str, layers: int, context: int, batches: list[int], prompt: int, chunks: list[int]
) -> None:
    """In each rank; the first one prints."""
    device = use_device("cpu" if kind == "cpu" else f"cuda:{place.rank}")
    woken = threading.Event()
    group = RankGroup(place, device, _STEP_TIMEOUT_S, woken.set)
    exchange = group.connect()
    console = Console(quiet=group.rank != 0)
    times = time_agreement(group, woken)
    shown = table(
        "shared memory", "gloo", "from sleep", title=f"agreement of {group.world_size} ranks, us: median / p90"
    )
    shown.add_row(summary(times.shared_memory), summary(times.gloo), summary(times.waking))
    console.print(shown, "")

    config = DecodeBench(layers=max(1, layers), rank_of=group.world_size, context=context)
    hidden_size = 7168
    shown = table("rows", "gather", "reduce", title=f"rows of {hidden_size} bfloat16 a rank, us")
    for rows, (gather, reduce) in time_exchange(group, exchange, hidden_size).items():
        shown.add_row(str(rows), f"{gather:.1f}", f"{reduce:.1f}")
    console.print(shown, "")

    if device.type == "cuda":
        shown = table("rank", *_HOST_READS, title="read from each rank's own host pool, GB/s")
        for rank, rates in enumerate(time_host_reads(group)):
            shown.add_row(str(rank), *(f"{rate:.1f}" for rate in astuple(rates)))
        console.print(shown, "")

    if prompt:
        whole, part = models_of(replace(config, context=prompt), device)
        shown = table("chunk", "group", "one rank", "ratio", title=f"prompt of {prompt} tokens, {layers} layers, s")
        for chunk in chunks:
            took = time_prompt_of(group, exchange, whole, part, prompt, chunk)
            shown.add_row(str(chunk), f"{took.group_s:.3f}", f"{took.alone_s:.3f}", f"{took.ratio:.2f}")
        console.print(shown, "")
        del whole, part

    if layers:
        model = build_model(config, device)
        shown = table("batch", "group", "alone", "HBM limit", "us a mixture more", title=f"step of {layers} layers, ms")
        for batch in batches:
            step = time_steps_of(group, exchange, model, context, batch)
            cells = [f"{step.group_ms:.2f}", f"{step.alone_ms:.2f}", f"{step.limit_ms:.2f}"]
            shown.add_row(str(batch), *cells, f"{step.us_per_mixture:.0f}" if step.mixtures else "")
        console.print(shown, "")
    while not group.done():
        pass
    group.close()


if __name__ == "__main__":
    run(main)
