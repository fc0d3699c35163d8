"""The flags of all commands, each defined once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Family(StrEnum):
    DEEPSEEK_V32 = "deepseek_v32"
    GLM_MOE_DSA = "glm_moe_dsa"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class AttentionBackend(StrEnum):
    AUTO = "auto"
    TRITON = "triton"
    TORCH = "torch"


class TransferProtocol(StrEnum):
    AUTO = "auto"
    RDMA = "rdma"
    TCP = "tcp"
    SHM = "shm"


class TransferChecksum(StrEnum):
    OFF = "off"
    SAMPLE = "sample"
    FULL = "full"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


ModelPath = Annotated[Path, typer.Option(help="Hugging Face checkpoint directory (deepseek_v32 or glm_moe_dsa).")]
ServedModelName = Annotated[str | None, typer.Option(help="Model name that clients use; default: the model path.")]
Host = Annotated[str, typer.Option(help="Address to bind HTTP and ZeroMQ to.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 takes a free one.")]
ControlPort = Annotated[int, typer.Option(min=0, max=65535, help="ZeroMQ port; 0 takes a free one.")]
AdvertiseHost = Annotated[
    str | None, typer.Option(help="Address that other processes reach this one at; default: --host.")
]
ControlHost = Annotated[str | None, typer.Option(help="Address to bind ZeroMQ to; default: --host.")]
KeyDir = Annotated[
    Path | None,
    typer.Option(envvar="HISPARSE_PD_KEY_DIR", help="Keys by which processes know each other; `hisparse-pd keygen`."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Let other machines reach this process without keys: trust your network.")
]
Gateways = Annotated[
    list[str] | None,
    typer.Option(
        "--gateway",
        help="HOST:PORT of a gateway's control port to register with, or of all gateways whose addresses the name has; "
        "may be repeated.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; with `serve`, cuda is a GPU for each node.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Weights and KV; auto is the checkpoint's own.")]
AttentionBackendOption = Annotated[
    AttentionBackend,
    typer.Option(
        "--attention-backend",
        help="What computes attention and its selections; auto: triton for bfloat16 on CUDA, else torch.",
    ),
]
ContextLength = Annotated[
    int | None, typer.Option(min=2, help="Longest prompt plus output; default: the checkpoint's maximum.")
]
MemFractionStatic = Annotated[
    float | None,
    typer.Option(help="Part of the free device memory that pools may take; default 0.8 on CUDA, 0.1 on CPU."),
]
ChunkedPrefillSize = Annotated[int, typer.Option(help="Prompt tokens computed in one forward pass.")]
PageSize = Annotated[int, typer.Option(help="Tokens per page of the prefill pool, or of a decode node's index keys.")]
MaxTotalTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Size of the prefill KV pool in tokens, at least one context; default: from memory."),
]
Protocol = Annotated[
    TransferProtocol,
    typer.Option(
        "--transfer-protocol",
        help="auto: shared memory where the decode node's pool can be mapped, RDMA where both have it, else TCP.",
    ),
]
TransferHost = Annotated[
    str | None, typer.Option(help="Address that KV is written to, on the data network; default: --advertise-host.")
]
TransferPorts = Annotated[
    str, typer.Option(help="MIN-MAX: ports for Mooncake, two per engine, on every interface; see docs/operations.md.")
]
Checksum = Annotated[
    TransferChecksum,
    typer.Option("--transfer-checksum", help="What the decode node checks of what was sent, before it is used."),
]
TransferTimeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds that a request's transfer may go on after its computation.")
]
IbDevice = Annotated[str, typer.Option(help="RDMA devices to use, comma-separated; default: all.")]
HiSparse = Annotated[
    str | None,
    typer.Option(
        "--hisparse-config",
        help="JSON: device_buffer_size, top_k, host_to_device_ratio or host_pool_gib, swap_in_block_size.",
    ),
]
MaxRunningRequests = Annotated[int, typer.Option(min=1, help="Requests that decode at a time.")]
MaxDeviceSlots = Annotated[
    int | None, typer.Option(min=1, help="Hot-buffer slots in device memory; default: from memory.")
]
MaxQueuedRequests = Annotated[int, typer.Option(min=1, help="Requests that may wait; beyond it clients get 429.")]
PrefillRetries = Annotated[int, typer.Option(min=0, help="Further prefill attempts after a failed one.")]
PrefillTimeout = Annotated[
    float,
    typer.Option(min=1.0, help="Seconds that a prefill node may take to accept a prompt, or to compute any one chunk."),
]
AllowLocalPrefill = Annotated[
    bool, typer.Option(help="Let the decode node compute prompts while no prefill node is registered.")
]
DebugVerifySwapIn = Annotated[
    bool, typer.Option(help="Compare every swapped-in item with its host copy (slow).", hidden=False)
]
DisableCudaGraph = Annotated[
    bool, typer.Option(help="Launch every kernel of a decode step one by one instead of replaying recorded steps.")
]
RequestTimeout = Annotated[float, typer.Option(min=0.1, help="Seconds after which a request is given up with 504.")]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="Key that clients must present; may be repeated. Better in the environment, HISPARSE_PD_API_KEY, or a "
        "file: a command line is public until the process has started.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File of keys that clients must present, one a line; read again when it changes."),
]
SslCertfile = Annotated[Path | None, typer.Option(help="Certificate chain (PEM): serve HTTPS.")]
SslKeyfile = Annotated[Path | None, typer.Option(help="Private key (PEM) of --ssl-certfile.")]
MaxBodyMib = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Largest request body in MiB; beyond it 413. Default: 16 bytes per token of the context, at least 1 MiB.",
    ),
]
MaxTotalBodyMib = Annotated[
    int,
    typer.Option(
        min=1,
        help="MiB of bodies that the gateway holds at a time, a prompt token counting at least 8 bytes; "
        "beyond it clients get 429.",
    ),
]
MaxConcurrentRequests = Annotated[
    int, typer.Option(min=1, help="Requests that the gateway holds at a time; beyond it clients get 429.")
]
HeaderTimeout = Annotated[
    float,
    typer.Option(
        min=0.1,
        help="Seconds that a client has for a request's head, and for a TLS handshake; "
        "a body has as long, plus 1 s per 8 KiB.",
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(min=0, help="Seconds after SIGTERM in which what has begun may finish; 0, SIGINT: end at once."),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", case_sensitive=False, help="Least severe level to log.")
]
LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="text (key=value) or json.")]
