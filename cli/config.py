"""Configuration of `hisparse-pd serve` and `hisparse-pd sizing`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from base.flags import Flag
from decode_node.config import DecodeConfig
from gateway.config import GatewayConfig
from model.families import ShapeName
from prefill_node.config import PrefillConfig
from service.config import SpeculativeNumSteps


@dataclass(frozen=True, kw_only=True)
class ServeConfig(GatewayConfig, PrefillConfig, DecodeConfig):
    """The flags of all kinds of process. Fields declared again, without a Flag, `serve` chooses itself."""

    prefill_nodes: Annotated[int, Flag("Prefill processes.", min=0)] = 1
    decode_nodes: Annotated[int, Flag("Decode processes.", min=1)] = 1
    prefill_ranks: Annotated[int, Flag("Processes of each prefill node: its --ranks.", min=1, max=64)] = 1
    decode_ranks: Annotated[int, Flag("Processes of each decode node: its --ranks.", min=1, max=64)] = 1
    ranks: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    control_host: str | None = None
    control_port: int = 0
    advertise_host: str | None = None
    gateways: tuple[str, ...] = ()
    transfer_host: str | None = None
    transfer_ports: str = "15000-16999"
    kv_events_config: str | None = None
    debug_verify_swap_in: bool = False


@dataclass(frozen=True, kw_only=True)
class SizingConfig:
    """The flags of `sizing`. Defaults are machines of eight H200.

    new_positions: some 275 is what others report for a hot buffer of twice the top-k. times_limit: what a step of 64
    requests with as many took on one (docs/benchmarks.md, "A decode step").
    """

    shape: Annotated[ShapeName, Flag("Whose sizes to take.")] = "deepseek-v3.2"
    ranks: Annotated[int, Flag("GPUs of the node.", min=1, max=64)] = 8
    nnodes: Annotated[int, Flag("Machines that have them.", min=1)] = 1
    context_length: Annotated[int, Flag("Tokens of each request, prompt and answer.", min=2)] = 65536
    kv_cache_dtype: Annotated[Literal["bfloat16", "fp8_e4m3"], Flag("Of items and index keys.")] = "fp8_e4m3"
    speculative_num_steps: Annotated[
        SpeculativeNumSteps,
        Flag("As of the node: above 0 it has the draft layer. Figures are of steps without drafts."),
    ] = "auto"
    device_buffer_size: Annotated[int | None, Flag("Hot slots of a request; default: twice the top-k.", min=1)] = None
    chunked_prefill_size: Annotated[int, Flag("Prompt tokens of one forward pass of all ranks.", min=1)] = 16384
    device_gib: Annotated[float, Flag("Memory that an idle GPU has free.", min=1.0)] = 139.0
    mem_fraction_static: Annotated[float, Flag("Part of what weights leave that pools take.", min=0.01, max=1.0)] = 0.8
    host_gib: Annotated[float, Flag("Memory of each machine.", min=1.0)] = 2048.0
    reserved_gib: Annotated[float, Flag("Of it, for all but the pools.", min=0.0)] = 256.0
    new_positions: Annotated[int, Flag("Positions per request and layer that a step has to swap in.", min=0)] = 275
    link_gb_per_s: Annotated[float, Flag("PCIe of each GPU.", min=1.0)] = 55.0
    times_limit: Annotated[float, Flag("How many times the hardware's limit a step takes.", min=1.0)] = 1.7
