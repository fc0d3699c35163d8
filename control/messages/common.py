"""Parts of every conversation: roles, peers, identities, pings."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from base.wire import Identifier, UInt, WireModel

Role = Literal["gateway", "prefill", "decode"]
ADDRESS_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*:\d{1,5}$"
HostPort = Annotated[str, Field(pattern=ADDRESS_PATTERN, max_length=262)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
CacheSalt = Annotated[str, Field(max_length=128)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=2**24)]
TraceParent = Annotated[str, Field(pattern=r"^(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?$")]
"""The context of a span, as W3C Trace Context has it; empty if the request is not traced."""


GATEWAY: frozenset[Role] = frozenset({"gateway"})
PREFILL: frozenset[Role] = frozenset({"prefill"})
DECODE: frozenset[Role] = frozenset({"decode"})
NODES = PREFILL | DECODE
ANYONE = GATEWAY | NODES


class Message(WireModel):
    """Base of all kinds. The class name is the kind on the wire. sent_by: from other roles, the kind is malformed."""

    kinds: ClassVar[dict[str, type["Message"]]] = {}
    sent_by: ClassVar[frozenset[Role]]

    def __init_subclass__(cls, sent_by: frozenset[Role]) -> None:
        cls.sent_by = sent_by
        Message.kinds[cls.__name__] = cls


class Peer(WireModel):
    """A process on the control plane: HOST:PORT of its mailbox, and an id that each start draws. Stable."""

    role: Role
    address: HostPort
    boot_id: Identifier


MAX_RANKS = 1024
"""Processes of one node, at most."""
MAX_LISTED = 4096
"""Nodes in a list, at most: decode nodes go through it for each request that waits, in each turn."""
MAX_ATTEMPTS = 2**14
"""Attempts of one message, at most."""
RankPeers = Annotated[tuple[Peer, ...], Field(max_length=MAX_RANKS)]
ListedPeers = Annotated[tuple[Peer, ...], Field(max_length=MAX_LISTED)]
LongestPrompts = Annotated[dict[Identifier, UInt], Field(max_length=MAX_LISTED)]
RanksOfNodes = Annotated[dict[Identifier, RankPeers], Field(max_length=MAX_LISTED)]


class Identity(WireModel):
    """What two processes must agree on, field by field."""

    def differences(self, other: Self) -> str:
        """The fields in which the two differ, with both values, or an empty string. An empty field fits every value."""
        return ", ".join(
            f"{name} {mine} != {theirs}"
            for name in type(self).model_fields
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)) and "" not in (mine, theirs)
        )


class ModelIdentity(Identity):
    """What two nodes must agree on before KV may pass between them. Page sizes may differ."""

    fingerprint: Identifier
    dtype: Identifier
    kv_format: Identifier
    draft_layer: bool
    num_layers: UInt
    num_index_layers: UInt
    item_bytes: UInt
    index_key_bytes: UInt


class CheckpointIdentity(Identity):
    """What a gateway, which has no weights, and a node must agree on: the same ids must mean the same text to both.

    config, tokenizer: digests of config.json and tokenizer.json, empty where the process has no such file.
    """

    vocab_size: UInt
    config: Annotated[str, Field(max_length=128)]
    tokenizer: Annotated[str, Field(max_length=128)] = ""


class Ping(Message, sent_by=ANYONE):
    """Asks whether this process is alive. Its control thread answers, however busy the process is. Stable."""

    nonce: UInt


class Pong(Message, sent_by=ANYONE):
    """The process lived after the ping with this nonce was sent; the sender says which boot it is. Stable."""

    nonce: UInt
