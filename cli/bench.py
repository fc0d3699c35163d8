"""`hisparse-pd bench`: measurements. Each command prints a table and writes JSON and a PNG."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.flags import option
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from transfer.choices import ChecksumMode

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
    methods: Annotated[
        list[str] | None, swept("ours, token, page, ceiling or nixl; default: all that is installed.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option(help="Measure how long a prompt waits when it is sent while its chunks compute.")
    ] = True,
    transfer_checksum: Annotated[ChecksumMode, option(PrefillConfig, "transfer_checksum")] = "sample",
    ib_device: Annotated[str, option(PrefillConfig, "ib_device")] = "",
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
    from benchmarks.flags import parse_choices, parse_numbers
    from benchmarks.transfer.cases import Fragmentation, Protocol, Sweep
    from benchmarks.transfer.command import TransferBench, run_transfer_bench
    from benchmarks.transfer.methods import Group, MethodFailed

    config = TransferBench(
        role=role.value,
        target=target,
        host=host,
        port=port,
        sweep=Sweep(
            tokens=parse_numbers("--tokens", tokens),
            layers=parse_numbers("--layers", layers),
            item_bytes=parse_numbers("--item-bytes", item_bytes),
            page_size=parse_numbers("--page-size", page_size),
            source=parse_choices("--source", source, Fragmentation),
            destination=parse_choices("--destination", destination, Fragmentation),
            protocol=parse_choices("--protocol", protocol, Protocol),
            concurrency=parse_numbers("--concurrency", concurrency),
        ),
        rounds=rounds,
        quick=quick,
        methods=parse_choices("--methods", methods, Group),
        overlap=overlap,
        ib_device=ib_device,
        transfer_checksum=transfer_checksum,
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


@app.command("swap-in")
def swap_in(
    top_k: Annotated[int, typer.Option(min=1, help="Selected positions per request.")] = 2048,
    device_buffer_size: Annotated[int, typer.Option(min=1, help="Hot slots per request.")] = 4096,
    item_bytes: Annotated[int, typer.Option(min=8, help="Bytes of a token in one layer.")] = 1152,
    context_length: Annotated[int, typer.Option(min=1, help="Tokens per request in the host pool.")] = 16384,
    swap_in_block_size: Annotated[int | None, typer.Option(help="Threads per block; default: by the device.")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write every figure.")] = Path(
        "bench-swap-in.json"
    ),
    png_path: Annotated[Path, typer.Option("--png", help="Where to draw time against misses.")] = Path(
        "bench-swap-in.png"
    ),
) -> None:
    """Time the CUDA swap-in kernel by batch and misses, in graph replays and as single launches."""
    from benchmarks.swap_in.bench import SwapInBench, run_swap_in_bench

    run_swap_in_bench(
        SwapInBench(
            top_k=top_k,
            device_buffer_size=device_buffer_size,
            item_bytes=item_bytes,
            context_length=context_length,
            swap_in_block_size=swap_in_block_size,
            json=json_path,
            png=png_path,
        )
    )


@app.command()
def serving(
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="http://HOST:PORT of an OpenAI-compatible service, or LABEL=URL; repeated to compare several. "
            "Default: a service is started here.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its model; default: the only one.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key for --base-url.")] = None,
    extra_body: Annotated[str | None, typer.Option(help="JSON object: further fields of each request.")] = None,
    model_path: Annotated[
        Path | None, typer.Option(help="Checkpoint to serve here; default: a tiny random one.")
    ] = None,
    hisparse_config: Annotated[str | None, option(DecodeConfig, "hisparse_config")] = None,
    compare_hisparse_config: Annotated[
        list[str] | None,
        typer.Option(help="Serve with this configuration too, one after the other; may be repeated."),
    ] = None,
    serve_flags: Annotated[
        list[str] | None, typer.Argument(help="After --: further flags of `hisparse-pd serve`.", show_default=False)
    ] = None,
    input_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per prompt; default 1024.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per answer; default 128.")] = None,
    range_ratio: Annotated[
        float, typer.Option(help="Both lengths are drawn from (1 - ratio) to (1 + ratio) times as many.")
    ] = 0.0,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Token ids to draw from; default: the checkpoint's, 256 with --base-url."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL file of prompts instead: {"prompt": ..., "output_tokens": ...}.')
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and arrivals.")] = 0,
    concurrency: Annotated[list[str] | None, swept("Clients that wait for their answers; default 1,4,16.")] = None,
    request_rate: Annotated[
        list[str] | None, swept("Requests per second, at random times, instead; inf: all at once.")
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Per load; default 64, and at least 4 per client.")
    ] = None,
    warmup_requests: Annotated[
        int | None, typer.Option(min=0, help="Ahead of each load, not counted; default: one per client, or 4.")
    ] = None,
    request_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a whole answer.")] = 600.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Good requests have their first token by then.")] = None,
    slo_itl_ms: Annotated[
        float | None, typer.Option(help="Good requests have 99% of their tokens within this of the one before.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small requests and few, in less than a minute.")] = False,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write every figure.")] = Path(
        "bench-serving.json"
    ),
    png_path: Annotated[Path, typer.Option("--png", help="Where to draw tokens per second and gaps.")] = Path(
        "bench-serving.png"
    ),
) -> None:
    """Put load on a service: this one, started here, or any that speaks OpenAI's completions API."""
    from benchmarks.plotting import check_installed

    # The same extra brings the HTTP client, which the next lines import.
    check_installed()
    from benchmarks.flags import parse_numbers, parse_rates
    from benchmarks.serving.command import NothingAnswered, run_serving_bench
    from benchmarks.serving.config import ServingBench

    config = ServingBench(
        base_urls=tuple(base_url or ()),
        model=model,
        api_key=api_key,
        extra_body=extra_body,
        model_path=model_path,
        hisparse_config=hisparse_config,
        compare_hisparse_config=tuple(compare_hisparse_config or ()),
        serve_flags=tuple(serve_flags or ()),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        range_ratio=range_ratio,
        vocab_size=vocab_size,
        prompts=prompts,
        seed=seed,
        concurrency=parse_numbers("--concurrency", concurrency),
        request_rate=parse_rates("--request-rate", request_rate),
        num_requests=num_requests,
        warmup_requests=warmup_requests,
        request_timeout=request_timeout,
        slo_ttft_ms=slo_ttft_ms,
        slo_itl_ms=slo_itl_ms,
        quick=quick,
        json=json_path,
        png=png_path,
    )
    try:
        run_serving_bench(config)
    except NothingAnswered as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)
