"""`hisparse-pd`: reads flags once into a typed configuration and starts a process.

Commands import what they run only when they run it, so that --help is quick and each process loads what it needs.
"""

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from setproctitle import setproctitle

from base.errors import ProcessFailed, StartupError
from cli import bench, keygen, quarantine
from cli import options as opt
from service.descriptors import raise_file_limit
from service.lifecycle import DRAIN_TIMEOUT_S, end_on_sigterm_until_served

Config = TypeVar("Config")

_SECRET_FLAGS = ("--api-key",)

app = typer.Typer(
    help="Prefill/decode disaggregation with direct-to-DRAM KV transfer and HiSparse decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(quarantine.app)
app.command()(keygen.keygen)
app.add_typer(bench.app, name="bench")


@app.command()
def prefill(
    model_path: opt.ModelPath,
    gateways: opt.Gateways = None,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8010,
    control_port: opt.ControlPort = 8011,
    advertise_host: opt.AdvertiseHost = None,
    key_dir: opt.KeyDir = None,
    insecure: opt.Insecure = False,
    device: opt.Device = "cpu",
    dtype: opt.DtypeOption = opt.Dtype.AUTO,
    attention_backend: opt.AttentionBackendOption = opt.AttentionBackend.AUTO,
    context_length: opt.ContextLength = None,
    page_size: opt.PageSize = 64,
    chunked_prefill_size: opt.ChunkedPrefillSize = 2048,
    max_total_tokens: opt.MaxTotalTokens = None,
    mem_fraction_static: opt.MemFractionStatic = None,
    transfer_protocol: opt.Protocol = opt.TransferProtocol.AUTO,
    transfer_checksum: opt.Checksum = opt.TransferChecksum.SAMPLE,
    transfer_timeout: opt.TransferTimeout = 60.0,
    transfer_host: opt.TransferHost = None,
    transfer_ports: opt.TransferPorts = "15000-16999",
    ib_device: opt.IbDevice = "",
    drain_timeout: opt.DrainTimeout = DRAIN_TIMEOUT_S,
    log_level: opt.LogLevelOption = opt.LogLevel.INFO,
    log_format: opt.LogFormatOption = opt.LogFormat.TEXT,
) -> None:
    """Run a prefill node: prompt in, KV out."""
    flags = dict(locals())
    from prefill_node.process import PrefillConfig, run_prefill_node

    run_prefill_node(configured(PrefillConfig, flags))


@app.command()
def decode(
    model_path: opt.ModelPath,
    gateways: opt.Gateways = None,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8020,
    control_port: opt.ControlPort = 8021,
    advertise_host: opt.AdvertiseHost = None,
    key_dir: opt.KeyDir = None,
    insecure: opt.Insecure = False,
    device: opt.Device = "cpu",
    dtype: opt.DtypeOption = opt.Dtype.AUTO,
    attention_backend: opt.AttentionBackendOption = opt.AttentionBackend.AUTO,
    context_length: opt.ContextLength = None,
    hisparse_config: opt.HiSparse = None,
    max_running_requests: opt.MaxRunningRequests = 32,
    max_device_slots: opt.MaxDeviceSlots = None,
    max_queued_requests: opt.MaxQueuedRequests = 256,
    prefill_retries: opt.PrefillRetries = 2,
    prefill_timeout: opt.PrefillTimeout = 120.0,
    allow_local_prefill: opt.AllowLocalPrefill = False,
    chunked_prefill_size: opt.ChunkedPrefillSize = 2048,
    page_size: opt.PageSize = 64,
    mem_fraction_static: opt.MemFractionStatic = None,
    transfer_protocol: opt.Protocol = opt.TransferProtocol.AUTO,
    transfer_host: opt.TransferHost = None,
    transfer_ports: opt.TransferPorts = "15000-16999",
    ib_device: opt.IbDevice = "",
    debug_verify_swap_in: opt.DebugVerifySwapIn = False,
    disable_cuda_graph: opt.DisableCudaGraph = False,
    drain_timeout: opt.DrainTimeout = DRAIN_TIMEOUT_S,
    log_level: opt.LogLevelOption = opt.LogLevel.INFO,
    log_format: opt.LogFormatOption = opt.LogFormat.TEXT,
) -> None:
    """Run a decode node: full KV in host memory, hot buffers on the device."""
    flags = dict(locals())
    from decode_node.process import DecodeConfig, run_decode_node

    run_decode_node(configured(DecodeConfig, flags))


@app.command()
def gateway(
    model_path: opt.ModelPath,
    served_model_name: opt.ServedModelName = None,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    control_host: opt.ControlHost = None,
    control_port: opt.ControlPort = 8001,
    advertise_host: opt.AdvertiseHost = None,
    key_dir: opt.KeyDir = None,
    insecure: opt.Insecure = False,
    context_length: opt.ContextLength = None,
    request_timeout: opt.RequestTimeout = 600.0,
    api_key: opt.ApiKeyOption = None,
    api_key_file: opt.ApiKeyFile = None,
    ssl_certfile: opt.SslCertfile = None,
    ssl_keyfile: opt.SslKeyfile = None,
    max_body_mib: opt.MaxBodyMib = None,
    max_total_body_mib: opt.MaxTotalBodyMib = 128,
    max_concurrent_requests: opt.MaxConcurrentRequests = 1024,
    header_timeout: opt.HeaderTimeout = 10.0,
    drain_timeout: opt.DrainTimeout = DRAIN_TIMEOUT_S,
    log_level: opt.LogLevelOption = opt.LogLevel.INFO,
    log_format: opt.LogFormatOption = opt.LogFormat.TEXT,
) -> None:
    """Run a gateway: the OpenAI HTTP API and the registry of nodes."""
    from gateway.keys import given_keys
    from gateway.process import GatewayConfig, run_gateway

    run_gateway(
        GatewayConfig(
            model_path=str(model_path),
            served_model_name=served_model_name,
            host=host,
            port=port,
            control_host=control_host or host,
            control_port=control_port,
            advertise_host=advertise_host or control_host or host,
            key_dir=key_dir,
            insecure=insecure,
            context_length=context_length,
            request_timeout=request_timeout,
            api_keys=given_keys(api_key),
            api_key_file=api_key_file,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            max_body_mib=max_body_mib,
            max_total_body_mib=max_total_body_mib,
            max_concurrent_requests=max_concurrent_requests,
            header_timeout=header_timeout,
            drain_timeout=drain_timeout,
            log_level=log_level.value,
            log_format=log_format.value,
        )
    )


@app.command()
def serve(
    model_path: opt.ModelPath,
    served_model_name: opt.ServedModelName = None,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    key_dir: opt.KeyDir = None,
    insecure: opt.Insecure = False,
    prefill_nodes: Annotated[int, typer.Option(min=0, help="Prefill processes.")] = 1,
    decode_nodes: Annotated[int, typer.Option(min=1, help="Decode processes.")] = 1,
    device: opt.Device = "cpu",
    dtype: opt.DtypeOption = opt.Dtype.AUTO,
    attention_backend: opt.AttentionBackendOption = opt.AttentionBackend.AUTO,
    context_length: opt.ContextLength = None,
    hisparse_config: opt.HiSparse = None,
    max_running_requests: opt.MaxRunningRequests = 32,
    max_device_slots: opt.MaxDeviceSlots = None,
    max_queued_requests: opt.MaxQueuedRequests = 256,
    prefill_retries: opt.PrefillRetries = 2,
    prefill_timeout: opt.PrefillTimeout = 120.0,
    allow_local_prefill: opt.AllowLocalPrefill = False,
    page_size: opt.PageSize = 64,
    chunked_prefill_size: opt.ChunkedPrefillSize = 2048,
    max_total_tokens: opt.MaxTotalTokens = None,
    mem_fraction_static: opt.MemFractionStatic = None,
    transfer_protocol: opt.Protocol = opt.TransferProtocol.AUTO,
    transfer_checksum: opt.Checksum = opt.TransferChecksum.SAMPLE,
    transfer_timeout: opt.TransferTimeout = 60.0,
    ib_device: opt.IbDevice = "",
    disable_cuda_graph: opt.DisableCudaGraph = False,
    request_timeout: opt.RequestTimeout = 600.0,
    api_key: opt.ApiKeyOption = None,
    api_key_file: opt.ApiKeyFile = None,
    ssl_certfile: opt.SslCertfile = None,
    ssl_keyfile: opt.SslKeyfile = None,
    max_body_mib: opt.MaxBodyMib = None,
    max_total_body_mib: opt.MaxTotalBodyMib = 128,
    max_concurrent_requests: opt.MaxConcurrentRequests = 1024,
    header_timeout: opt.HeaderTimeout = 10.0,
    drain_timeout: opt.DrainTimeout = DRAIN_TIMEOUT_S,
    log_level: opt.LogLevelOption = opt.LogLevel.INFO,
    log_format: opt.LogFormatOption = opt.LogFormat.TEXT,
) -> None:
    """Run a gateway with prefill and decode processes on this machine."""
    from cli.serve import ServePlan, devices_for, free_port, serve_until_stopped
    from gateway.keys import given_keys

    if prefill_nodes == 0 and not allow_local_prefill:
        raise StartupError(
            "--prefill-nodes 0: nothing would compute prompts; give --allow-local-prefill to let decode nodes do it"
        )
    both = {
        "--model-path": model_path,
        "--key-dir": key_dir,
        "--dtype": dtype.value,
        "--attention-backend": attention_backend.value,
        "--context-length": context_length,
        "--page-size": page_size,
        "--chunked-prefill-size": chunked_prefill_size,
        "--mem-fraction-static": mem_fraction_static,
        "--transfer-protocol": transfer_protocol.value,
        "--ib-device": ib_device or None,
        "--drain-timeout": drain_timeout,
        "--log-level": log_level.value,
        "--log-format": log_format.value,
    }
    plan = ServePlan(
        host=host,
        port=port or free_port(),
        api_keys=given_keys(api_key),
        ssl_certfile=ssl_certfile,
        drain_timeout=drain_timeout,
        num_prefill=prefill_nodes,
        num_decode=decode_nodes,
        devices=devices_for(device, prefill_nodes + decode_nodes, mem_fraction_static),
        gateway_flags={
            "--model-path": model_path,
            "--served-model-name": served_model_name,
            "--context-length": context_length,
            "--request-timeout": request_timeout,
            "--api-key-file": api_key_file,
            "--ssl-certfile": ssl_certfile,
            "--ssl-keyfile": ssl_keyfile,
            "--max-body-mib": max_body_mib,
            "--max-total-body-mib": max_total_body_mib,
            "--max-concurrent-requests": max_concurrent_requests,
            "--header-timeout": header_timeout,
            "--drain-timeout": drain_timeout,
            "--key-dir": key_dir,
            "--insecure": insecure,
            "--log-level": log_level.value,
            "--log-format": log_format.value,
        },
        prefill_flags={
            **both,
            "--max-total-tokens": max_total_tokens,
            "--transfer-checksum": transfer_checksum.value,
            "--transfer-timeout": transfer_timeout,
        },
        decode_flags={
            **both,
            "--hisparse-config": hisparse_config,
            "--max-running-requests": max_running_requests,
            "--max-device-slots": max_device_slots,
            "--max-queued-requests": max_queued_requests,
            "--prefill-retries": prefill_retries,
            "--prefill-timeout": prefill_timeout,
            "--allow-local-prefill": allow_local_prefill,
            "--disable-cuda-graph": disable_cuda_graph,
        },
    )
    raise typer.Exit(serve_until_stopped(plan))


@app.command("tiny-model")
def tiny_model(
    directory: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    family: Annotated[opt.Family, typer.Option(help="Model family.")] = opt.Family.DEEPSEEK_V32,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    layers: Annotated[int, typer.Option(help="Hidden layers.")] = 4,
    hidden_size: Annotated[int, typer.Option(help="Width of the hidden states.")] = 64,
    index_topk: Annotated[int, typer.Option(help="Positions that a layer attends to.")] = 64,
    index_n_heads: Annotated[int, typer.Option(help="Heads of the indexer, at least 16.")] = 32,
    max_position_embeddings: Annotated[int, typer.Option(help="Context length.")] = 8192,
) -> None:
    """Write a complete random checkpoint, to try things out with."""
    from model.tiny import write_tiny_checkpoint

    try:
        write_tiny_checkpoint(
            directory,
            family.value,
            seed,
            layers=layers,
            hidden_size=hidden_size,
            index_topk=index_topk,
            index_n_heads=index_n_heads,
            max_position_embeddings=max_position_embeddings,
        )
    except ValueError as error:
        raise StartupError(f"tiny-model: {error}") from error
    typer.echo(f"{directory}: a {family.value} checkpoint of random weights")


def configured(kind: type[Config], flags: Mapping[str, Any]) -> Config:
    """The configuration whose fields are named as the flags: choices as their values, repeated flags as tuples."""

    def plain(name: str, value: Any) -> Any:
        if name == "gateways":
            return tuple(value or ())
        return value.value if isinstance(value, Enum) else value

    return kind(**{name: plain(name, value) for name, value in flags.items()})


def title(words: Sequence[str]) -> str:
    """The command line without its secrets, for those who list processes."""
    shown = ["hisparse-pd"]
    for before, word in pairwise(["", *words]):
        flag, equals, _ = word.partition("=")
        hidden = "***" if before in _SECRET_FLAGS else f"{flag}=***" if equals and flag in _SECRET_FLAGS else word
        shown.append(hidden)
    return " ".join(shown)


def main(args: list[str] | None = None) -> None:
    """Run a command. An error that stops start-up is one line on standard error and exit code 2, a later one 1."""
    setproctitle(title(sys.argv[1:] if args is None else args))
    end_on_sigterm_until_served()
    raise_file_limit()
    try:
        app(args=args)
    except StartupError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except ProcessFailed as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
