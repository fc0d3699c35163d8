"""`python -m benchmarks.decode.in_turns`: steps with HiSparse and with all KV in HBM, in turns on one machine.

Either has the same device memory for KV. Nothing runs under a profiler, which would make later steps longer.
"""

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.decode.batch import DecodingBatch
from benchmarks.decode.bench import numbers, selections_of
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.timing import describe_filling, use_streams
from benchmarks.decode.workload import build_model
from benchmarks.device import give_back_memory, need_cuda
from benchmarks.documents import check_writable
from benchmarks.parts_report import what_was_computed, write_parts
from benchmarks.program import run
from benchmarks.tables import table
from model.families import ShapeName
from model.roofline import RankModel

SCHEMA = 1
HISPARSE, ALL_IN_HBM = "HiSparse", "all in HBM"
WAYS = (HISPARSE, ALL_IN_HBM)


@dataclass(frozen=True)
class Turns:
    """A batch in one way. step_ms: the median of the steps of each round. misses: of a token and index layer. buffer:
    hot slots of a request that is not whole in HBM. whole: how many requests are. filling_ms: of the last round, see
    StepTiming."""

    batch: int
    way: str
    step_ms: tuple[float, ...]
    misses: float
    buffer: int
    whole: int
    filling_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


def measure(config: DecodeBench, model: RankModel, batch: int, rounds: int, device: torch.device) -> list[Turns]:
    """A batch in each way that `--pools-gib` holds it in, in reverse order every other round. Raises StartupError if
    HiSparse is none of them."""
    turns = defaultdict[str, list[Turns]](list)
    ways = {way: replace(config, resident=way == ALL_IN_HBM) for way in WAYS}
    for number in range(rounds):
        for way, as_configured in list(ways.items())[:: -1 if number % 2 else 1]:
            try:
                turn = _turn(as_configured, model, batch, way, device)
                turns[way].append(turn)
            except StartupError as error:
                if way == HISPARSE:
                    raise
                typer.echo(f"{batch} requests, {way}: {error}")
                del ways[way]
            give_back_memory()
    return [replace(of[-1], step_ms=tuple(ms for turn in of for ms in turn.step_ms)) for of in turns.values()]


def _turn(config: DecodeBench, model: RankModel, batch: int, way: str, device: torch.device) -> Turns:
    decoding = DecodingBatch(config, model, batch, device)
    (selected,) = selections_of(config, model, [], decoding.hot_size)
    timing = decoding.time(selected, config.steps)
    whole, buffer = decoding.whole, decoding.pool.device_buffer_size
    decoding.close()
    return Turns(batch, way, (timing.median_ms,), timing.misses, buffer, whole, timing.filling_ms)


def main(
    shape: Annotated[str, typer.Option(help=f"Whose widths to take: {', '.join(get_args(ShapeName))}.")] = (
        "deepseek-v3.2"
    ),
    layers: Annotated[int | None, typer.Option(min=1, help="Layers, or all of the shape's.")] = None,
    rank_of: Annotated[int, typer.Option(min=1, help="Of a group of so many: that part of the experts.")] = 8,
    batch: Annotated[str, typer.Option(help="Requests that decode.")] = "1,8,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each request.")] = 32768,
    pools_gib: Annotated[float, typer.Option(min=1, help="HBM for KV.")] = 37,
    selections: Annotated[str, typer.Option(help="What steps select, as of bench decode.")] = "published",
    speculative_num_steps: Annotated[int, typer.Option(min=0, max=3, help="Drafts, all of them right.")] = 0,
    steps: Annotated[int, typer.Option(min=10, help="Steps that are timed in each turn.")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 3,
    json: Annotated[Path, typer.Option(help="Where to write every figure.")] = Path("bench-in-turns.json"),
) -> None:
    """Time a step of each batch in each way; a way that the memory does not hold is left out."""
    device = need_cuda("benchmarks.decode.in_turns")
    if shape not in get_args(ShapeName):
        raise StartupError(f"--shape {shape}: expected one of {', '.join(get_args(ShapeName))}")
    config = DecodeBench(
        shape=shape,  # type: ignore[arg-type]
        layers=layers,
        rank_of=rank_of,
        selections=(selections,),
        speculative_num_steps=speculative_num_steps,
        context=context,
        pools_gib=pools_gib,
        steps=steps,
        json=json,
    )
    check_writable(json)
    batches = numbers("--batch", (batch,), least=1)
    try:
        model = build_model(config, device, drafts=speculative_num_steps > 0)
    except ValueError as error:
        raise StartupError(f"benchmarks.decode.in_turns: {error}") from error
    streams = use_streams(device)
    measured: list[Turns] = []
    shown = table("requests", *(f"{way}, ms" for way in WAYS), "ratio", "misses", "buffer", "whole")
    for requests in batches:
        ways = {turns.way: turns for turns in measure(config, model, requests, rounds, device)}
        measured += ways.values()
        write_parts(json, SCHEMA, config, [asdict(turns) for turns in measured])
        ours, reference = ways[HISPARSE], ways.get(ALL_IN_HBM)
        cells = (f"{reference.median_ms:.2f}", f"{ours.median_ms / reference.median_ms:.3f}") if reference else ("", "")
        shown.add_row(
            str(requests), f"{ours.median_ms:.2f}", *cells, f"{ours.misses:.0f}", str(ours.buffer), str(ours.whole)
        )
        for turns in ways.values():
            rounded = ", ".join(f"{ms:.2f}" for ms in turns.step_ms)
            typer.echo(f"{requests} requests, {turns.way}: {rounded} ms")
            if filling := describe_filling(turns.filling_ms):
                typer.echo(filling)
    del streams
    Console().print(shown)
    typer.echo(
        f"{what_was_computed(config, model.num_bytes)}, {context} tokens a request, {pools_gib} GiB for KV, "
        f"{torch.cuda.get_device_name()}. ms: median over rounds of the median of {steps} steps."
    )


if __name__ == "__main__":
    run(main)
