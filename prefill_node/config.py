"""How a prefill node is configured."""

from dataclasses import dataclass
from typing import Annotated, Literal

from base.flags import Flag
from service.config import ControlPort, NodeConfig, Port
from transfer.choices import ChecksumMode

FetchPolicy = Literal["auto", "always", "never"]
"""Which prefixes are fetched from decode nodes instead of being computed: auto, where that is faster."""


TransferChecksum = Annotated[ChecksumMode, Flag("What the decode node checks of what was sent, before it is used.")]


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(NodeConfig):
    """The flags of a prefill node."""

    alike_in_ranks = (*NodeConfig.alike_in_ranks, "page_size", "attention_backend", "transfer_protocol")
    port: Port = 8010
    control_port: ControlPort = 8011
    max_total_tokens: Annotated[
        int | None,
        Flag("Size of the prefill KV pool in tokens, at least one context; default: from memory.", min=1),
    ] = None
    transfer_checksum: TransferChecksum = "sample"
    transfer_timeout: Annotated[
        float, Flag("Seconds that a request's transfer may go on after its computation.", min=0.1)
    ] = 60.0
    fetch_prefixes: Annotated[
        FetchPolicy,
        Flag("auto: what the decode node has of a prompt is read from there where that is faster than computing it."),
    ] = "auto"
