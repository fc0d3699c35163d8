"""`hisparse-pd bench`: measurements. Each command prints a table and writes JSON and a PNG."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import options as opt

app = typer.Typer(help="Measure this project beside what it is built on.", no_args_is_help=True)


class Role(StrEnum):
    BOTH = "both"
    TARGET = "target"
    INITIATOR = "initiator"


def swept(help_text: str) -> Any:
    """A flag that takes several values: repeated, or separated by commas."""
    return typer.Option(help=f"{help_text} Several: repeat it or separate them by commas.", show_default=False)


@app.command()
def transfer(
    role: Annotated[Role, typer.Option(help="Both on this machine, or one side of two.")] = Role.BOTH,
    target: Annotated[str | None, typer.Option(help="HOST:PORT that `--role target` printed.")] = None,
    host: Annotated[str, typer.Option(help="Address that a target listens at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of a target; 0 takes a free one.")] = 0,
    tokens: Annotated[list[str] | None, swept("Tokens per request, such as 32768 or 32K.")] = None,
    layers: Annotated[list[str] | None, swept("Layers.")] = None,
    item_bytes: Annotated[list[str] | None, swept("Bytes of a token in one layer.")] = None,
    page_size: Annotated[list[str] | None, swept("Tokens per page.")] = None,
    source: Annotated[list[str] | None, swept("Source layout: contiguous, pages or items (apart).")] = None,
    destination: Annotated[list[str] | None, swept("Destination layout: contiguous, pages or items (apart).")] = None,
    protocol: Annotated[list[str] | None, swept("tcp, rdma or shm.")] = None,
    concurrency: Annotated[list[str] | None, swept("Requests that are sent at once.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed runs per method and case; default 15.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few small cases, in less than 30 seconds.")] = False,
    nixl: Annotated[bool, typer.Option(help="Measure NIXL as well where it is installed.")] = True,
    transfer_checksum: opt.Checksum = opt.TransferChecksum.SAMPLE,
    ib_device: opt.IbDevice = "",
    json_path: Annotated[Path, typer.Option("--json", help="Where to write every figure.")] = Path(
        "bench-transfer.json"
    ),
    png_path: Annotated[Path, typer.Option("--png", help="Where to draw latency against tokens.")] = Path(
        "bench-transfer.png"
    ),
) -> None:
    """Send prompts' KV from one process to another, in this project's way and in others.

    Without a swept flag, a choice of cases is measured. The flags that are given are combined each with each; the
    others stay at 32K tokens, 8 layers, 1152 bytes, pages of 64 tokens, scattered pages to contiguous slots, tcp.
    """
    from benchmarks.transfer.cases import Fragmentation, Protocol, Sweep, parse_list
    from benchmarks.transfer.command import TransferBench, run_transfer_bench
    from benchmarks.transfer.methods import MethodFailed

    config = TransferBench(
        role=role.value,
        target=target,
        host=host,
        port=port,
        sweep=Sweep(
            tokens=parse_list("--tokens", tokens, int),
            layers=parse_list("--layers", layers, int),
            item_bytes=parse_list("--item-bytes", item_bytes, int),
            page_size=parse_list("--page-size", page_size, int),
            source=parse_list("--source", source, Fragmentation),
            destination=parse_list("--destination", destination, Fragmentation),
            protocol=parse_list("--protocol", protocol, Protocol),
            concurrency=parse_list("--concurrency", concurrency, int),
        ),
        rounds=rounds,
        quick=quick,
        nixl=nixl,
        ib_device=ib_device,
        transfer_checksum=transfer_checksum.value,
        json=json_path,
        png=png_path,
    )
    try:
        run_transfer_bench(config)
    except MethodFailed as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)
