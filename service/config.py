"""Configuration of processes. Each field is a flag of the command line; `cli.flags` makes the flags.

Import nothing slow here: `--help` loads it.
"""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from base.errors import StartupError
from base.flags import Flag
from kvcache.choices import KVCacheDtype
from service.lifecycle import DRAIN_TIMEOUT_S
from transfer.choices import TransferProtocol

Port = Annotated[int, Flag("HTTP port; 0 takes a free one.", min=0, max=65535)]
ControlPort = Annotated[int, Flag("ZeroMQ port; 0 takes a free one.", min=0, max=65535)]
IbDevice = Annotated[str, Flag("RDMA devices to use, comma-separated; default: all.")]


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The flags of every process."""

    model_path: Annotated[Path, Flag("Hugging Face checkpoint directory (deepseek_v32 or glm_moe_dsa).")]
    host: Annotated[str, Flag("Address to bind HTTP and ZeroMQ to.")] = "127.0.0.1"
    port: Port = 0
    control_port: ControlPort = 0
    advertise_host: Annotated[
        str | None,
        Flag("Address that other processes reach this one at; default: --host."),
    ] = None
    key_dir: Annotated[
        Path | None,
        Flag("Keys by which processes know each other; `hisparse-pd keygen`.", env="HISPARSE_PD_KEY_DIR"),
    ] = None
    insecure: Annotated[
        bool, Flag("Let other machines reach this process without keys: trust your network.", name="--insecure")
    ] = False
    context_length: Annotated[
        int | None,
        Flag(
            "Longest prompt plus output; default: the checkpoint's maximum, on nodes as far as pools have room.", min=2
        ),
    ] = None
    drain_timeout: Annotated[
        float, Flag("Seconds after SIGTERM in which what has begun may finish; 0, SIGINT: end at once.", min=0)
    ] = DRAIN_TIMEOUT_S
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Flag("Least severe level to log.", case_sensitive=False)
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Flag("text (key=value) or json.")] = "text"
    otlp_traces_endpoint: Annotated[
        str | None, Flag("URL of an OTLP collector for traces of requests, as http://collector:4318/v1/traces.")
    ] = None

    @property
    def advertised_host(self) -> str:
        """The address of this process for others, except for KV."""
        return self.advertise_host or self.host


SpeculativeNumSteps = Literal["auto", "0", "1", "2", "3"]
MOST_DRAFTS = 3
"""Of a step. A block's shared memory has no room for the selections of more queries."""


def drafts_of(steps: SpeculativeNumSteps, has_draft_layer: bool) -> int:
    """Tokens that a step drafts at most; 0: the node is without the draft layer.

    has_draft_layer: of the checkpoint. Raises StartupError if the node cannot draft and has to.
    """
    if steps == "auto":
        return MOST_DRAFTS if has_draft_layer else 0
    if steps != "0" and not has_draft_layer:
        raise StartupError(
            f"--speculative-num-steps {steps}: the checkpoint has no multi-token prediction layer "
            "(num_nextn_predict_layers in config.json, and its weights); give auto or 0"
        )
    return int(steps)


@dataclass(frozen=True, kw_only=True)
class NodeConfig(ProcessConfig):
    """The flags of prefill and decode nodes.

    alike_in_ranks: fields that decide how steps are computed and sent, and so have to be alike in all ranks.
    """

    alike_in_ranks: ClassVar[tuple[str, ...]] = ("quantization", "speculative_num_steps", "ranks")
    load_format: Annotated[
        Literal["auto", "dummy"],
        Flag(
            "auto: the checkpoint's weights; dummy: random ones, made on the device, to measure without a checkpoint."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "fp8"],
        Flag("auto: weights as the checkpoint has them; fp8: others become block-fp8 while they are loaded."),
    ] = "auto"
    gateways: Annotated[
        tuple[str, ...],
        Flag(
            "HOST:PORT of a gateway's control port to register with, or of all gateways whose addresses the name "
            "has; may be repeated.",
            name="--gateway",
        ),
    ] = ()
    device: Annotated[str, Flag("cpu, cuda or cuda:N; with `serve`, cuda is a GPU for each node.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Flag("What is computed in; auto is the checkpoint's own."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Flag("How KV is stored and sent, the same on all nodes; auto follows --dtype."),
    ] = "auto"
    speculative_num_steps: Annotated[
        SpeculativeNumSteps,
        Flag(
            "Tokens that a decode step drafts at most, by the checkpoint's multi-token prediction layer; 0: that layer "
            "is not loaded. auto: up to 3, by measured step times and acceptance. Above 0 on all nodes, or on none."
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "triton", "torch"],
        Flag("What computes attention and its selections; auto: triton for bfloat16 on CUDA, else torch."),
    ] = "auto"
    mem_fraction_static: Annotated[
        float | None,
        Flag("Part of the free device memory that pools may take; default 0.8 on CUDA, 0.1 on CPU."),
    ] = None
    chunked_prefill_size: Annotated[int, Flag("Prompt tokens computed in one forward pass.", min=1)] = 2048
    ranks: Annotated[
        int,
        Flag(
            "Processes of the node, which step together and have a part of the experts each; on GPUs, one for each.",
            min=1,
            max=64,
        ),
    ] = 1
    nnodes: Annotated[
        int, Flag("Hosts of the node, each with an equal part of its ranks; start the command on all of them.", min=1)
    ] = 1
    node_rank: Annotated[int, Flag("Which of its hosts this one is, from 0.", min=0)] = 0
    dist_init_addr: Annotated[
        str | None, Flag("HOST:PORT of host 0 at which its hosts find each other, the same on all of them.")
    ] = None
    step_timeout: Annotated[
        float, Flag("Seconds that a step of several ranks may take before the node ends.", min=1.0)
    ] = 30.0
    page_size: Annotated[
        int,
        Flag("Tokens per page of the prefill pool, or of a decode node's index keys.", min=1),
    ] = 64
    enable_prefix_caching: Annotated[
        bool, Flag("Keep the KV of prompts and answers for requests that begin with the same tokens.")
    ] = True
    kv_events_config: Annotated[
        str | None,
        Flag(
            "JSON, as of vLLM: publish what the prefix cache gains and loses. enable_kv_cache_events, endpoint, "
            "replay_endpoint, buffer_steps, hwm, topic, token_ids, array_like."
        ),
    ] = None
    transfer_protocol: Annotated[
        TransferProtocol,
        Flag("auto: shared memory where the decode node's pool can be mapped, RDMA where both have it, else TCP."),
    ] = "auto"
    transfer_host: Annotated[
        str | None, Flag("Address that KV is written to, on the data network; default: --advertise-host.")
    ] = None
    transfer_ports: Annotated[
        str, Flag("MIN-MAX: ports for Mooncake, two per engine, on every interface; see docs/operations/secure.md.")
    ] = "15000-16999"
    ib_device: IbDevice = ""

    @property
    def data_host(self) -> str:
        """The address that KV is written to."""
        return self.transfer_host or self.advertised_host


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach that address. Looks up no name: of names, only `localhost` counts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_processes(flag: str, host: str, key_dir: Path | None, insecure: bool) -> None:
    """Raises StartupError if other machines could reach the control port without a key. flag: which set `host`."""
    if not is_loopback(host) and key_dir is None and not insecure:
        raise StartupError(
            f"{flag} {host}: other machines reach it, so it takes keys: make them with `hisparse-pd keygen DIR` and "
            "give --key-dir DIR; or --insecure, if anyone who reaches this address may do as they like"
        )


def check_clients(host: str, has_key: bool, insecure: bool) -> None:
    """Raises StartupError if other machines could reach the HTTP API without a key."""
    if not is_loopback(host) and not has_key and not insecure:
        raise StartupError(
            f"--host {host}: other machines reach it, so clients need an API key: give --api-key (or set "
            "HISPARSE_PD_API_KEY); or --insecure, if anyone who reaches this address may use the service"
        )
