"""Configuration of `hisparse-pd serve`."""

from dataclasses import dataclass
from typing import Annotated

from base.flags import Flag
from decode_node.config import DecodeConfig
from gateway.config import GatewayConfig
from prefill_node.config import PrefillConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig(GatewayConfig, PrefillConfig, DecodeConfig):
    """The flags of all three kinds of process, each passed to those that take it, and the numbers of nodes.

    Fields that are declared again, without a Flag, are not flags of `serve`: it chooses the addresses itself.
    """

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
    debug_verify_swap_in: bool = False
