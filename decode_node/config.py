"""How a decode node is configured."""

from dataclasses import dataclass
from typing import Annotated

from base.flags import Flag
from service.config import ControlPort, NodeConfig, Port

HiSparseJson = Annotated[
    str | None,
    Flag("JSON: device_buffer_size, top_k, host_to_device_ratio or host_pool_gib, swap_in_block_size, resident_rows."),
]


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(NodeConfig):
    """The flags of a decode node. Its `page_size` is that of the index keys in device memory."""

    alike_in_ranks = (*NodeConfig.alike_in_ranks, "max_running_requests", "disable_cuda_graph")
    port: Port = 8020
    control_port: ControlPort = 8021
    hisparse_config: HiSparseJson = None
    max_running_requests: Annotated[int, Flag("Requests that decode at a time, in each rank.", min=1)] = 32
    max_device_slots: Annotated[
        int | None,
        Flag("Hot-buffer slots in device memory; default: from memory.", min=1),
    ] = None
    max_queued_requests: Annotated[int, Flag("Requests that may wait; beyond it clients get 429.", min=1)] = 256
    prefill_retries: Annotated[int, Flag("Further prefill attempts after a failed one.", min=0)] = 2
    prefill_timeout: Annotated[
        float,
        Flag("Seconds that a prefill node may take to accept a prompt, or to compute any one chunk.", min=1.0),
    ] = 120.0
    allow_local_prefill: Annotated[
        bool, Flag("Let the decode node compute prompts while no prefill node is registered.")
    ] = False
    debug_verify_swap_in: Annotated[bool, Flag("Compare every swapped-in item with its host copy (slow).")] = False
    disable_cuda_graph: Annotated[
        bool, Flag("Launch every kernel of a decode step one by one instead of replaying recorded steps.")
    ] = False
