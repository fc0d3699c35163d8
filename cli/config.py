"""How `hisparse-pd serve` is configured: as its processes are, and with how many nodes there are to be."""

from dataclasses import dataclass
from typing import Annotated

from base.flags import Flag
from decode_node.config import DecodeConfig
from gateway.config import GatewayConfig
from prefill_node.config import PrefillConfig

NOT_OF_SERVE = frozenset(
    {
        "control_host",
        "control_port",
        "advertise_host",
        "gateways",
        "transfer_host",
        "transfer_ports",
        "debug_verify_swap_in",
    }
)
"""Fields that are no flags of `serve`: addresses, which it chooses itself, and what is for single nodes only."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(GatewayConfig, PrefillConfig, DecodeConfig):
    """The fields of all three kinds of process. What several have is given to each of them."""

    prefill_nodes: Annotated[int, Flag("Prefill processes.", min=0)] = 1
    decode_nodes: Annotated[int, Flag("Decode processes.", min=1)] = 1
