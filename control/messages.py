"""Control messages: one small class per kind, which validates itself.

Unknown fields are ignored and missing optional ones default, so that neighbouring releases understand each other. Where
that is not enough the wire version changes, and what is marked as stable here is all that both versions understand
(`control.codec`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Role = Literal["gateway", "prefill", "decode"]
Transport = Literal["shm", "rdma", "tcp"]
UInt = Annotated[int, Field(ge=0, lt=2**63)]
ADDRESS_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*:\d{1,5}$"
Address = Annotated[str, Field(pattern=ADDRESS_PATTERN, max_length=262)]
Identifier = Annotated[str, Field(min_length=1, max_length=128)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=2**24)]
ADDRESS_LIMIT = 2**63
"""Addresses are computed with in signed integers of 64 bits: no memory that is named may end past it."""


class WireModel(BaseModel):
    """A frozen piece of a message; wrong types are errors, not conversions."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Peer(WireModel):
    """A process on the control plane. A restart keeps the address and changes the boot id. Stable."""

    role: Role
    address: Address
    boot_id: Identifier


class ModelIdentity(WireModel):
    """What two nodes must agree on before KV may pass between them. Page sizes may differ."""

    fingerprint: Identifier
    dtype: Identifier
    kv_format: Identifier
    num_layers: UInt
    num_index_layers: UInt
    item_bytes: UInt
    index_key_bytes: UInt

    def differences(self, other: "ModelIdentity") -> str:
        """The fields in which the two differ, with both values, or an empty string."""
        return ", ".join(
            f"{name} {getattr(self, name)} != {getattr(other, name)}"
            for name in ModelIdentity.model_fields
            if getattr(self, name) != getattr(other, name)
        )


class CheckpointIdentity(WireModel):
    """What a gateway, which has no weights, and a node must agree on: the same ids must mean the same text to both.

    Digests of config.json and tokenizer.json; one is empty where the process has no such file, and then says nothing.
    """

    vocab_size: UInt
    config: Annotated[str, Field(max_length=128)]
    tokenizer: Annotated[str, Field(max_length=128)] = ""

    def differences(self, other: "CheckpointIdentity") -> str:
        """The fields in which the two differ, with both values, or an empty string."""
        return ", ".join(
            f"{name} {mine} != {theirs}"
            for name in CheckpointIdentity.model_fields
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)) and "" not in (mine, theirs)
        )


class BufferInfo(WireModel):
    """One registered buffer per layer: base address, length and bytes per item."""

    ptrs: tuple[UInt, ...]
    lengths: tuple[UInt, ...]
    item_lengths: tuple[UInt, ...]

    @model_validator(mode="after")
    def _same_count(self) -> Self:
        if not len(self.ptrs) == len(self.lengths) == len(self.item_lengths):
            raise ValueError("ptrs, lengths and item_lengths differ in length")
        if any(item == 0 or length % item for item, length in zip(self.item_lengths, self.lengths, strict=True)):
            raise ValueError("every length must be a multiple of its item length")
        if any(ptr + length >= ADDRESS_LIMIT for ptr, length in zip(self.ptrs, self.lengths, strict=True)):
            raise ValueError("a buffer ends outside the address space")
        return self

    @property
    def num_items(self) -> int:
        return min((n // item for n, item in zip(self.lengths, self.item_lengths, strict=True)), default=0)


class Sampling(WireModel):
    """How the next token is drawn. `top_logprobs` None: no log probabilities; 0: the chosen token's only."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: UInt = 0
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class Token(WireModel):
    """A sampled token. `logprob` is None where none was asked for."""

    token_id: TokenId
    logprob: float | None = None
    top_logprobs: tuple[tuple[TokenId, float], ...] = ()


class Message(WireModel):
    """Base of all kinds; the class name is the kind on the wire."""

    kinds: ClassVar[dict[str, type["Message"]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        Message.kinds[cls.__name__] = cls


# --- membership: nodes and gateways -------------------------------------------------------------------------------


class Register(Message):
    """Node to gateway, at start and whenever the gateway does not know it. Answered by Registered or Refused.

    `via` is the address that the node was told to use; answers repeat it, since a gateway may call itself otherwise.
    `via` is stable. A gateway of another wire version refuses the node.
    """

    via: Address

    role: Literal["prefill", "decode"]
    identity: ModelIdentity
    transports: tuple[Transport, ...]
    page_size: UInt
    max_request_tokens: UInt
    local_prefill: bool = False
    checkpoint: CheckpointIdentity | None = None


class Registered(Message):
    """Gateway to node: it may take requests. Stable.

    A node takes it for a refusal if it comes in another wire version: it could not read that gateway's requests.
    """

    via: Address


class Refused(Message):
    """Gateway to node: it may not join. The reason names both values. Stable."""

    via: Address
    reason: str


class Heartbeat(Message):
    """Node to gateway. queued_tokens: prompt tokens waiting for prefill, or KV tokens that a decode node owes.

    `via` is stable. A gateway of another wire version, which has taken the place of one that knew the node, answers
    with Refused.
    """

    via: Address
    ready: bool
    queued_tokens: UInt
    running_requests: UInt = 0


class HeartbeatAck(Message):
    """Gateway to node. A node that is not known registers again. Decode nodes learn the prefill nodes from it.

    longest_prompts: as in Generate. leaving: boot ids of prefill nodes that said so. None of them will take another
    request.
    """

    via: Address
    known: bool
    prefill_nodes: tuple[Peer, ...] = ()
    longest_prompts: dict[Identifier, UInt] = {}
    leaving: tuple[Identifier, ...] = ()


class Leaving(Message):
    """Node to gateway: it stops and takes no more requests."""


# --- requests: gateway and decode node ----------------------------------------------------------------------------


class Generate(Message):
    """Gateway to decode node, which owns the request from here on.

    Prefill nodes come in order of preference; longest_prompts: the most tokens that each takes, by its boot id.
    """

    request_id: Identifier
    prompt_ids: Annotated[TokenIds, Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    sampling: Sampling = Sampling()
    stop_token_ids: TokenIds = ()
    prefill_nodes: tuple[Peer, ...] = ()
    longest_prompts: dict[Identifier, UInt] = {}


class Accepted(Message):
    """Decode node to gateway: the request is queued here."""

    request_id: Identifier


class Rejected(Message):
    """Decode node to gateway: the request was not taken and nothing of it is kept."""

    request_id: Identifier
    code: Literal["queue_full", "too_long", "draining"]
    reason: str
    retry_after: Annotated[float, Field(ge=0)] = 0.0


FinishReason = Literal["stop", "length", "abort", "error"]


class Output(WireModel):
    """New tokens of one request. `start` is the index of the first one, so that a lost message is noticed.

    Tokens that were sent before are dropped. Where some are missing before `start`, the gateway asks for them (Resend).
    """

    request_id: Identifier
    start: UInt
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


class Outputs(Message):
    """Decode node to gateway: what one step produced for that gateway's requests."""

    outputs: tuple[Output, ...]


class Ended(Message):
    """Gateway to decode node: the Output with a finish reason has arrived, and all tokens before it.

    That Output is repeated until this answers it, and the tokens are kept until then.
    """

    request_id: Identifier


class Resend(Message):
    """Gateway to decode node: tokens from index `start` on did not arrive, and later ones did.

    Answered by Outputs from there on, up to the newest token, and with the finish reason if the request is over; by an
    Output with finish reason `abort` if the decode node keeps nothing of it. Repeated until the gap is closed.
    """

    request_id: Identifier
    start: UInt


class Cancel(Message):
    """Gateway to decode node: the client left. Repeated until an Output with a finish reason answers it."""

    request_id: Identifier


# --- transfer: decode node and prefill node -----------------------------------------------------------------------


class Session(WireModel):
    """A Mooncake engine that takes writes, by the name that it has for other engines of its transport."""

    transport: Literal["rdma", "tcp"]
    name: Identifier


class SharedMemory(WireModel):
    """Memory that processes of the same host may map: descriptor `fd` of process `pid`, a memfd named `name`.

    The name is random, so that only that memory has it. `base`: the owner's address of its first byte.
    """

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    fd: Annotated[int, Field(ge=0, lt=2**31)]
    name: Identifier
    base: UInt
    length: Annotated[int, Field(ge=1, lt=2**63)]

    @model_validator(mode="after")
    def _is_addressable(self) -> Self:
        if self.base + self.length >= ADDRESS_LIMIT:
            raise ValueError("the shared memory ends outside the address space")
        return self


class Destination(WireModel):
    """Where a decode node wants KV written: its pools, and the ways to reach them.

    `shared` holds all buffers.
    """

    identity: ModelIdentity
    buffers: BufferInfo
    sessions: tuple[Session, ...] = ()
    shared: SharedMemory | None = None

    @model_validator(mode="after")
    def _buffers_are_shared(self) -> Self:
        if self.shared is not None:
            start, stop = self.shared.base, self.shared.base + self.shared.length
            for ptr, length in zip(self.buffers.ptrs, self.buffers.lengths, strict=True):
                if not start <= ptr <= ptr + length <= stop:
                    raise ValueError("a buffer is outside the shared memory")
        return self

    @property
    def transports(self) -> tuple[Transport, ...]:
        shared: tuple[Transport, ...] = () if self.shared is None else ("shm",)
        return *shared, *(session.transport for session in self.sessions)


class Checksum(NamedTuple):
    """xxh3, 64 bits, of the items of positions [start, stop) in buffer number `buffer`, in the order of positions.

    It covers what was sent and says nothing of how either side splits it, so sender and receiver may cut differently.
    """

    buffer: int
    start: int
    stop: int
    digest: int


class Checksums(WireModel):
    """Column by column: a long prompt has thousands, and as many objects would take longer to read than to verify."""

    buffers: tuple[UInt, ...] = ()
    starts: tuple[UInt, ...] = ()
    stops: tuple[UInt, ...] = ()
    digests: tuple[Annotated[int, Field(ge=0, lt=2**64)], ...] = ()

    @classmethod
    def of(cls, checksums: Sequence[Checksum]) -> Self:
        if not checksums:
            return cls()
        buffers, starts, stops, digests = zip(*checksums, strict=True)
        return cls(buffers=buffers, starts=starts, stops=stops, digests=digests)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.buffers) == len(self.starts) == len(self.stops) == len(self.digests):
            raise ValueError("the columns differ in length")
        return self

    def __len__(self) -> int:
        return len(self.buffers)

    def rows(self) -> Iterator[Checksum]:
        return map(Checksum, self.buffers, self.starts, self.stops, self.digests)


class AttemptId(NamedTuple):
    """One try to prefill a request: the same from the first message about it to the last.

    decode: boot id of the decode node. epoch: counts the tries of that node for this request, from 1. A request that
    moves to another decode node keeps its id, and each decode node counts epochs of its own.
    """

    decode: Identifier
    request_id: Identifier
    epoch: UInt

    @property
    def log_fields(self) -> dict[str, object]:
        """What log lines name of it."""
        return {"request_id": self.request_id, "epoch": self.epoch}


class PrefillRequest(Message):
    """Decode node to prefill node: compute these tokens and write their KV to these slots.

    `token_ids` are all tokens of the sequence but the last, which the decode node computes. `extents` are (start,
    length) runs of destination slots in the order of positions; they are reserved for this attempt until the prefill
    node says that no write of it is in flight.
    """

    attempt: AttemptId
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    destination: Destination
    extents: tuple[tuple[UInt, UInt], ...]
    hisparse: bool = False

    @model_validator(mode="after")
    def _extents_cover_tokens(self) -> Self:
        slots = self.destination.buffers.num_items
        if any(start + length > slots for start, length in self.extents):
            raise ValueError(f"an extent ends past the {slots} registered slots")
        covered = sum(length for _, length in self.extents)
        if covered < len(self.token_ids):
            raise ValueError(f"{covered} slots for {len(self.token_ids)} tokens")
        if covered > slots:
            raise ValueError(f"{covered} slots of {slots} registered ones: extents overlap")
        return self


class PrefillAccepted(Message):
    """Prefill node to decode node: it works on the attempt, or has taken it up before."""

    attempt: AttemptId


class ChunkDone(Message):
    """Prefill node to decode node: every write of a chunk before the last was confirmed. Repeated until ChunkTaken.

    Only sent with checksums, so that they can be verified while later chunks compute. `number`: of those that are sent
    for the attempt, in whatever order they land, from 0.
    """

    attempt: AttemptId
    number: UInt
    checksums: Checksums


class ChunkTaken(Message):
    """Decode node to prefill node: that ChunkDone need not be said again. Its checksums may not be verified yet."""

    attempt: AttemptId
    number: UInt


class PrefillDone(Message):
    """Prefill node to decode node, after the last write was confirmed. Repeated until Admitted.

    chunks: how many chunks have a ChunkDone of their own, which may come later than this; `checksums` are of the rest.
    transfer_seconds: for how long something of it was being written, from the first post to the last confirmation;
    waits for layers to be computed, or for a sign of life of the decode node, are not in it.
    lingering: something of it was cut and posted again. The second copy has landed; the first may land later, with the
    same bytes at the same place. So the prompt can be used, and the decode node fences that off before its slots go to
    somebody else.
    """

    attempt: AttemptId
    num_tokens: UInt
    transferred_bytes: UInt = 0
    descriptors: UInt = 0
    transfer_seconds: Annotated[float, Field(ge=0)] = 0.0
    chunks: UInt = 0
    checksums: Checksums = Checksums()
    lingering: bool = False


class PrefillFailed(Message):
    """Prefill node to decode node: the attempt will not be completed here.

    Without `in_flight` it says as much as Quiesced, which has the same `lingering`. With it, posted writes have not all
    ended yet: it is repeated until Abort, which Quiesced answers in time. `leaving`: the node hands the request back
    because it is about to stop, and will take no other. `refused`: this node cannot do what was asked for; that is no
    sign that something is wrong with it.
    """

    attempt: AttemptId
    reason: str
    in_flight: bool = False
    lingering: bool = False
    leaving: bool = False
    refused: bool = False


class Admitted(Message):
    """Decode node to prefill node: the KV arrived, its source pages may go."""

    attempt: AttemptId


class Abort(Message):
    """Decode node to prefill node: stop writing. Repeated until Quiesced."""

    attempt: AttemptId


class Quiesced(Message):
    """Prefill node to decode node: no write of this attempt is in flight, and none will follow.

    `lingering`: some have failed without an answer, and what the network holds of them may still land. The decode node
    fences that off before it uses the slots again.
    """

    attempt: AttemptId
    lingering: bool = False


class Holding(Message):
    """Decode node to prefill node: how far are these attempts? Answered by Progress, and NotHeld."""

    attempts: tuple[AttemptId, ...] = ()


class Progress(Message):
    """Prefill node to decode node: how far it is with what it was asked about.

    computed: each attempt that it holds with the number of its tokens that are computed. current_pass: the number of
    the forward pass that is under way, whoever's prompts it computes; None if none is.
    """

    computed: tuple[tuple[AttemptId, UInt], ...] = ()
    current_pass: UInt | None = None


class NotHeld(Message):
    """Prefill node to decode node: these have nothing in flight here, which is as good as Quiesced."""

    attempts: tuple[AttemptId, ...] = ()


# --- liveness: any two processes ----------------------------------------------------------------------------------


class Ping(Message):
    """Is this process alive? Answered by the control thread, however busy the process is. Stable: a process that has
    taken another one's address proves that one dead also if it is of another wire version."""

    nonce: UInt


class Pong(Message):
    """It is, and the sender says which boot it is. The nonce is the ping's: it lived after that was sent. Stable."""

    nonce: UInt


SENT_BY: Mapping[Role, frozenset[type[Message]]] = {
    "gateway": frozenset({Ping, Pong, Registered, Refused, HeartbeatAck, Generate, Ended, Resend, Cancel}),
    "prefill": frozenset(
        {
            Ping,
            Pong,
            Register,
            Heartbeat,
            Leaving,
            PrefillAccepted,
            ChunkDone,
            PrefillDone,
            PrefillFailed,
            Quiesced,
            NotHeld,
            Progress,
        }
    ),
    "decode": frozenset(
        {
            Ping,
            Pong,
            Register,
            Heartbeat,
            Leaving,
            Accepted,
            Rejected,
            Outputs,
            PrefillRequest,
            ChunkTaken,
            Admitted,
            Abort,
            Holding,
        }
    ),
}
"""What each role may send. Anything else from it is malformed."""
