"""Between nodes and gateways: who is there, how busy it is, and what it has cached."""

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field

from base.block_hashes import BlockHashes
from base.wire import Identifier, UInt, WireModel
from control.messages.common import (
    GATEWAY,
    MAX_LISTED,
    NODES,
    CheckpointIdentity,
    HostPort,
    ListedPeers,
    LongestPrompts,
    Message,
    ModelIdentity,
    RankPeers,
    RanksOfNodes,
)
from transfer.choices import Transport


class Register(Message, sent_by=NODES):
    """Node to gateway, at start and whenever the gateway does not know it. Registered or Refused answers it."""

    via: HostPort
    role: Literal["prefill", "decode"]
    identity: ModelIdentity
    transports: tuple[Transport, ...]
    page_size: UInt
    max_request_tokens: UInt
    local_prefill: bool = False
    checkpoint: CheckpointIdentity | None = None
    ranks: RankPeers = ()
    rank_group: Annotated[str, Field(max_length=128)] = ""


class Registered(Message, sent_by=GATEWAY):
    """Gateway to node: it may take requests. In another wire version it counts as a refusal. Stable."""

    via: HostPort


class Refused(Message, sent_by=GATEWAY):
    """Gateway to node: it may not join. The reason names both values. Stable."""

    via: HostPort
    reason: str


Share = Annotated[float, Field(ge=0, le=1)]


class NodeTotals(WireModel):
    """What a node has done since its start.

    hits, misses: selected positions that were in hot slots, and that were not. swapped_bytes: fetched for misses.
    transferred_bytes: written to decode nodes.
    """

    hits: UInt = 0
    misses: UInt = 0
    swapped_bytes: UInt = 0
    transferred_bytes: UInt = 0


class Heartbeat(Message, sent_by=NODES):
    """Node to gateway, every second. HeartbeatAck answers it, or Refused from another wire version. via: stable."""

    via: HostPort
    ready: bool
    queued_tokens: UInt
    running_requests: UInt = 0
    kv_usage: Share = 0.0
    hot_usage: Share = 0.0
    totals: NodeTotals = NodeTotals()


class HeartbeatAck(Message, sent_by=GATEWAY):
    """Gateway to node. A node that is not `known` registers again."""

    via: HostPort
    known: bool
    prefill_nodes: ListedPeers = ()
    longest_prompts: LongestPrompts = Field(default_factory=dict)
    prefill_ranks: RanksOfNodes = Field(default_factory=dict)
    leaving: Annotated[tuple[Identifier, ...], Field(max_length=MAX_LISTED)] = ()
    cache_serial: UInt | None = None


class Leaving(Message, sent_by=NODES):
    """Node to gateway: it stops and takes no more requests."""


MAX_CACHE_BLOCKS = 2**20
"""Blocks that one CacheUpdate names at most, gained ones and lost ones each."""


def _whole_hashes(column: bytes) -> bytes:
    if len(column) % 8:
        raise ValueError(f"{len(column)} bytes are no column of 64-bit hashes")
    return column


HashColumn = Annotated[bytes, Field(max_length=8 * MAX_CACHE_BLOCKS), AfterValidator(_whole_hashes)]
"""Hashes of blocks (`base.block_hashes`), 8 bytes each, little-endian."""


class CacheUpdate(Message, sent_by=NODES):
    """Node to gateway: what changed in the prefix cache. Sent once; `HeartbeatAck.cache_serial` shows a loss."""

    serial: Annotated[int, Field(ge=1, lt=2**63)]
    gained: HashColumn = b""
    lost: HashColumn = b""
    whole: bool = False

    @classmethod
    def of(cls, serial: int, gained: BlockHashes, lost: BlockHashes, whole: bool = False) -> Self:
        """gained, lost: uint64 [blocks]."""
        return cls(serial=serial, gained=_column(gained), lost=_column(lost), whole=whole)

    @property
    def gained_hashes(self) -> BlockHashes:
        """uint64 [blocks]."""
        return np.frombuffer(self.gained, dtype="<u8")

    @property
    def lost_hashes(self) -> BlockHashes:
        """uint64 [blocks]."""
        return np.frombuffer(self.lost, dtype="<u8")


def _column(hashes: BlockHashes) -> bytes:
    return hashes.astype("<u8", copy=False).tobytes()
