"""`hisparse-pd bench`: benchmarks. Each command prints a table and writes JSON and a PNG."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from benchmarks.decode.config import DecodeBench
from benchmarks.prefill.config import PrefillBench
from benchmarks.serving.config import ServingBench
from benchmarks.swap_in.config import SwapInBench
from benchmarks.transfer.config import TransferBench
from cli.flags import takes_flags
from cli.panels import GroupedCommand

app = typer.Typer(help="Measure this project beside what it is built on.", no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
@takes_flags
def transfer(config: TransferBench) -> None:
    """Send prompts' KV from one process to another, in this project's way and in others.

    Without a swept flag, a choice of cases is measured. The flags that are given are combined each with each; the
    others stay at 32K tokens, 8 layers, 1152 bytes, pages of 64 tokens, scattered pages to contiguous slots, tcp.
    """
    from benchmarks.transfer.command import run_transfer_bench
    from benchmarks.transfer.methods import MethodFailed

    with _ended_by(MethodFailed):
        run_transfer_bench(config)


@app.command("swap-in", cls=GroupedCommand)
@takes_flags
def swap_in(config: SwapInBench) -> None:
    """Time the CUDA swap-in kernel by batch and misses, in graph replays and as single launches."""
    from benchmarks.swap_in.bench import run_swap_in_bench

    run_swap_in_bench(config)


@app.command(cls=GroupedCommand)
@takes_flags
def decode(config: DecodeBench) -> None:
    """Time a decode step of a published shape with random weights, part by part, beside what the hardware takes."""
    from benchmarks.decode.bench import run_decode_bench

    run_decode_bench(config)


@app.command(cls=GroupedCommand)
@takes_flags
def prefill(config: PrefillBench) -> None:
    """Time a chunk of a prompt of a published shape with random weights, as `bench decode` times a step."""
    from benchmarks.prefill.bench import run_prefill_bench

    run_prefill_bench(config)


@app.command(cls=GroupedCommand)
@takes_flags
def serving(config: ServingBench) -> None:
    """Put load on a service: this one, started here, or any that speaks OpenAI's completions API."""
    from benchmarks.plotting import check_installed

    # The next import needs the same optional packages.
    check_installed()
    from benchmarks.serving.command import NothingAnswered, run_serving_bench

    with _ended_by(NothingAnswered):
        run_serving_bench(config)


@contextmanager
def _ended_by(failure: type[Exception]) -> Iterator[None]:
    """Exit with one line and code 1 on this failure, and with code 130 on Ctrl-C."""
    try:
        yield
    except failure as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)
