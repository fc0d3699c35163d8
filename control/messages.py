"""Control messages: one class per kind, which validates itself.

docs/protocol.md has the protocol: who repeats what until what answers it, the states, and what of a frame is the same
in every wire version. Whoever changes a field here changes that page and, unless old processes may ignore the change,
`PROTOCOL_VERSION`. Unknown fields are ignored, and missing optional ones take their defaults.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from control.block_hashes import BlockHashes
from control.grammar import Grammar
from control.prompt_logprobs import Alternatives, PromptLogprobs

Role = Literal["gateway", "prefill", "decode"]
Transport = Literal["shm", "rdma", "tcp"]
UInt = Annotated[int, Field(ge=0, lt=2**63)]
ADDRESS_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*:\d{1,5}$"
Address = Annotated[str, Field(pattern=ADDRESS_PATTERN, max_length=262)]
Identifier = Annotated[str, Field(min_length=1, max_length=128)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
CacheSalt = Annotated[str, Field(max_length=128)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=2**24)]
ADDRESS_LIMIT = 2**63
"""No memory may end past it: address arithmetic is in signed integers of 64 bits."""


class WireModel(BaseModel):
    """A frozen piece of a message. A value of the wrong type is an error and is not converted."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Peer(WireModel):
    """A process on the control plane: HOST:PORT of its mailbox, and an id that each start draws anew. Stable."""

    role: Role
    address: Address
    boot_id: Identifier


MAX_RANKS = 1024
"""Processes of one node, at most."""
Ranks = Annotated[tuple[Peer, ...], Field(max_length=MAX_RANKS)]


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


class BufferInfo(WireModel):
    """Buffers, one per layer and then one per index layer: base address, length in bytes, bytes per item."""

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


MAX_BIASES = 1024
"""Token ids of one request whose logits are changed one by one."""
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Sampling(WireModel):
    """How the next token is drawn. `top_logprobs` None: no log probabilities; 0: the chosen token's only.

    min_p: tokens less likely than so much of the likeliest one are not drawn. Penalties are as in vLLM: frequency and
    presence count generated tokens, repetition those of the prompt, too. logit_bias: what is added to logits, by token.
    allowed_token_ids: None allows all. bad_words: sequences of tokens of which the last is not drawn behind the others.
    min_tokens: the first so many tokens are none of `Generate.stop_token_ids`.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: UInt = 0
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    logit_bias: Annotated[tuple[tuple[TokenId, float], ...], Field(max_length=MAX_BIASES)] = ()
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Annotated[
        tuple[Annotated[TokenIds, Field(min_length=1, max_length=MAX_BIASES)], ...], Field(max_length=MAX_BIASES)
    ] = ()
    min_tokens: UInt = 0


class Token(WireModel):
    """A sampled token. `logprob` is None where none was asked for."""

    token_id: TokenId
    logprob: float | None = None
    top_logprobs: tuple[tuple[TokenId, float], ...] = ()


class Message(WireModel):
    """Base of all kinds. The class name is the kind on the wire."""

    kinds: ClassVar[dict[str, type["Message"]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        Message.kinds[cls.__name__] = cls


# --- membership: nodes and gateways -------------------------------------------------------------------------------


class Register(Message):
    """Node to gateway, at start and whenever the gateway does not know it. Registered or Refused answers it.

    via: where the node was told to find the gateway, which may name itself otherwise; stable. max_request_tokens: the
    longest prompt (prefill), or prompt and output (decode). local_prefill: whether a decode node computes prompts.
    ranks: the other processes of a prefill node that has several; they write to slots that are named to the node.
    """

    via: Address
    role: Literal["prefill", "decode"]
    identity: ModelIdentity
    transports: tuple[Transport, ...]
    page_size: UInt
    max_request_tokens: UInt
    local_prefill: bool = False
    checkpoint: CheckpointIdentity | None = None
    ranks: Ranks = ()


class Registered(Message):
    """Gateway to node: it may take requests. In another wire version it counts as a refusal. Stable."""

    via: Address


class Refused(Message):
    """Gateway to node: it may not join. The reason names both values. Stable."""

    via: Address
    reason: str


class Heartbeat(Message):
    """Node to gateway, every second. HeartbeatAck answers it, or Refused from another wire version. via: stable.

    queued_tokens: prompt tokens that wait (prefill), or KV tokens that requests hold or may come to hold (decode).
    """

    via: Address
    ready: bool
    queued_tokens: UInt
    running_requests: UInt = 0


class HeartbeatAck(Message):
    """Gateway to node. A node that is not `known` registers again.

    prefill_nodes: the least loaded first. longest_prompts, prefill_ranks: see Generate. leaving: boot ids of prefill
    nodes. cache_serial: of the last CacheUpdate of this boot before which none is missing, 0 if there is none; None if
    the gateway wants none.
    """

    via: Address
    known: bool
    prefill_nodes: tuple[Peer, ...] = ()
    longest_prompts: dict[Identifier, UInt] = {}
    prefill_ranks: dict[Identifier, Ranks] = {}
    leaving: tuple[Identifier, ...] = ()
    cache_serial: UInt | None = None


class Leaving(Message):
    """Node to gateway: it stops and takes no more requests."""


MAX_CACHE_BLOCKS = 2**20
"""Blocks that one CacheUpdate names at most, gained ones and lost ones each."""


def _whole_hashes(column: bytes) -> bytes:
    if len(column) % 8:
        raise ValueError(f"{len(column)} bytes are no column of 64-bit hashes")
    return column


HashColumn = Annotated[bytes, Field(max_length=8 * MAX_CACHE_BLOCKS), AfterValidator(_whole_hashes)]
"""Hashes of blocks (`control.block_hashes`), 8 bytes each, little-endian."""


class CacheUpdate(Message):
    """Node to gateway: what changed in the node's prefix cache. Sent once; `HeartbeatAck.cache_serial` shows a loss.

    serial: 1 for the first update of a boot, one more for each further one. gained, lost: blocks, the ones that were
    used last first; lost ones left before the gained ones came. whole: `gained` is all that the node has, or the part
    of it that was used last.
    """

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


# --- requests: gateway and decode node ----------------------------------------------------------------------------


class Generate(Message):
    """Gateway to decode node: take this request. Repeated until Accepted, Rejected or Outputs answers it.

    prefill_nodes: in order of preference. longest_prompts: the most tokens that each takes, by its boot id.
    prefill_ranks: by boot id, the other ranks of those that have some. priority: a request with a lower one goes first,
    then that which came first. grammar: what the answer has to look like. cache_salt: requests with different ones
    share no cached KV. group: requests of one group have the same prompt, whose KV is prefilled once if they are at one
    node together. prompt_logprobs: log probabilities of the prompt's tokens are asked for, with so many alternatives
    each; they take a prompt that is computed whole, whatever is cached.
    """

    request_id: Identifier
    prompt_ids: Annotated[TokenIds, Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    sampling: Sampling = Sampling()
    stop_token_ids: TokenIds = ()
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    grammar: Grammar | None = None
    cache_salt: CacheSalt = ""
    group: Annotated[str, Field(max_length=128)] = ""
    prompt_logprobs: Alternatives | None = None
    prefill_nodes: tuple[Peer, ...] = ()
    longest_prompts: dict[Identifier, UInt] = {}
    prefill_ranks: dict[Identifier, Ranks] = {}


class Accepted(Message):
    """Decode node to gateway: it has the request."""

    request_id: Identifier


class Rejected(Message):
    """Decode node to gateway: it has not taken the request. retry_after: seconds."""

    request_id: Identifier
    code: Literal["queue_full", "too_long", "draining"]
    reason: str
    retry_after: Annotated[float, Field(ge=0)] = 0.0


FinishReason = Literal["stop", "length", "abort", "error", "invalid"]
"""Why a request ended. abort: another node may do it. error: it failed. invalid: no node can carry it out."""


class Output(WireModel):
    """New tokens of one request. start: index of the first one among the generated tokens, so that a loss shows.

    cached_tokens: tokens of the prompt that were not computed for this request. In the output with its first token and
    in its last one; 0 in others. prompt_logprobs: a piece of what was asked for. All pieces come before the first
    token, in outputs of their own.
    """

    request_id: Identifier
    start: UInt
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: UInt = 0
    prompt_logprobs: PromptLogprobs | None = None


class Outputs(Message):
    """Decode node to gateway: new tokens of its requests. One that ends a request is repeated until Ended."""

    outputs: tuple[Output, ...]


class Ended(Message):
    """Gateway to decode node: the Output with a finish reason has arrived, and all tokens before it."""

    request_id: Identifier


class Resend(Message):
    """Gateway to decode node: send the tokens from index `start` on again. Repeated until the gap is closed.

    With `start` 0 the log probabilities of the prompt come again, too.
    """

    request_id: Identifier
    start: UInt


class Cancel(Message):
    """Gateway to decode node: the client left. Repeated until an Output with a finish reason answers it."""

    request_id: Identifier


# --- transfer: decode node and prefill node -----------------------------------------------------------------------


class Session(WireModel):
    """A Mooncake engine that takes writes. name: the HOST:PORT by which other engines of its transport find it."""

    transport: Literal["rdma", "tcp"]
    name: Identifier


class SharedMemory(WireModel):
    """Memory that processes of the same host may map: descriptor `fd` of process `pid`, a memfd named `name`.

    The name is random, so that no other memory has it. base: the owner's address of its first byte. length: in bytes.
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
    """Where a decode node wants KV written: its pool's buffers, and the ways to reach them. `shared` holds them all."""

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
    """xxh3, 64 bits, of the items of positions [start, stop) in buffer number `buffer`, in the order of positions."""

    buffer: int
    start: int
    stop: int
    digest: int


class Checksums(WireModel):
    """Checksums as columns: a long prompt has thousands, and reading objects would take longer than verifying."""

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
    """One try to prefill a request. decode: boot id of the decode node. epoch: counts its tries, from 1."""

    decode: Identifier
    request_id: Identifier
    epoch: UInt

    @property
    def log_fields(self) -> dict[str, object]:
        """What log lines name of it."""
        return {"request_id": self.request_id, "epoch": self.epoch}


class PrefillRequest(Message):
    """Decode node to prefill node: compute these tokens and write their KV, from position `start` on, to these slots.

    token_ids: all tokens of the sequence but the last, which the decode node computes. start: the decode node has the
    KV of the positions before it. extents: (start, length) runs of slots in the order of positions, for `start` and
    those behind it. hisparse: whether the slots are in host memory. cache_salt: requests with different ones share no
    cached KV. prompt_logprobs: as in Generate; then last_token_id is the token that `token_ids` leaves out, and every
    token is computed, whatever is cached. ranks: boot ids of the node's other ranks, for which the slots are reserved,
    too: no others may write. Repeated until PrefillAccepted.
    """

    attempt: AttemptId
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    start: UInt = 0
    destination: Destination
    extents: tuple[tuple[UInt, UInt], ...]
    hisparse: bool = False
    cache_salt: CacheSalt = ""
    prompt_logprobs: Alternatives | None = None
    last_token_id: TokenId | None = None
    ranks: Annotated[tuple[Identifier, ...], Field(max_length=MAX_RANKS)] = ()

    @model_validator(mode="after")
    def _last_token_is_named(self) -> Self:
        if self.prompt_logprobs is not None and self.last_token_id is None:
            raise ValueError("prompt_logprobs needs last_token_id")
        return self

    @model_validator(mode="after")
    def _extents_cover_tokens(self) -> Self:
        slots = self.destination.buffers.num_items
        if any(start + length > slots for start, length in self.extents):
            raise ValueError(f"an extent ends past the {slots} registered slots")
        covered = sum(length for _, length in self.extents)
        if self.start >= len(self.token_ids):
            raise ValueError(f"nothing to write from position {self.start} on, of {len(self.token_ids)} tokens")
        if covered < len(self.token_ids) - self.start:
            raise ValueError(f"{covered} slots for {len(self.token_ids) - self.start} tokens")
        if covered > slots:
            raise ValueError(f"{covered} slots of {slots} registered ones: extents overlap")
        return self


class PrefillAccepted(Message):
    """Prefill node to decode node: it has the request, or had it before."""

    attempt: AttemptId


class ChunkDone(Message):
    """Prefill node to decode node: every write of a chunk before the last was confirmed. Repeated until ChunkTaken.

    Only chunks with checksums have one, which the decode node verifies while later chunks compute, and those that were
    asked for log probabilities. number: counts these messages of the attempt from 0, in the order in which their chunks
    landed. prompt_logprobs: those that no message before it has, of this chunk and of others.
    """

    attempt: AttemptId
    number: UInt
    checksums: Checksums
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class ChunkTaken(Message):
    """Decode node to prefill node: that ChunkDone has arrived. Its checksums may not be verified yet."""

    attempt: AttemptId
    number: UInt


class PrefillDone(Message):
    """Prefill node to decode node: every write was confirmed, and nothing is in flight. Repeated until Admitted.

    chunks: how many ChunkDone the attempt has; they may come later. checksums, prompt_logprobs: the rest.
    transfer_seconds: how long something of it was being written, without waits for layers or for a lease. lingering: a
    write was cut and posted again; the second copy has landed, and the first may still land, with the same bytes at the
    same place. cached_tokens: those whose KV the node had and did not compute.
    """

    attempt: AttemptId
    num_tokens: UInt
    transferred_bytes: UInt = 0
    descriptors: UInt = 0
    transfer_seconds: Annotated[float, Field(ge=0)] = 0.0
    chunks: UInt = 0
    checksums: Checksums = Checksums()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    lingering: bool = False
    cached_tokens: UInt = 0


class PrefillFailed(Message):
    """Prefill node to decode node: the attempt will not be completed here.

    in_flight: posted writes have not all ended; then it is repeated until Abort, and Quiesced follows when they have.
    Otherwise it says as much as Quiesced. lingering: as in Quiesced. leaving: the node is about to stop and takes no
    other request. refused: the node cannot do what was asked for, which is no sign that something is wrong with it.
    """

    attempt: AttemptId
    reason: str
    in_flight: bool = False
    lingering: bool = False
    leaving: bool = False
    refused: bool = False


class Admitted(Message):
    """Decode node to prefill node: the KV is here and verified, or not wanted any more. Its source pages may go."""

    attempt: AttemptId


class Abort(Message):
    """Decode node to prefill node: stop writing. Repeated until Quiesced."""

    attempt: AttemptId


class Quiesced(Message):
    """Prefill node to decode node: no write of this attempt is in flight, and none will follow.

    lingering: a write failed without an answer, and what the network holds of it may still land.
    """

    attempt: AttemptId
    lingering: bool = False


class Holding(Message):
    """Decode node to prefill node: how far are these attempts? Answered by Progress, and NotHeld or Quiesced."""

    attempts: tuple[AttemptId, ...] = ()


class Progress(Message):
    """Prefill node to decode node: how far it is with the attempts that it was asked about and holds.

    computed: the number of computed tokens of each. current_pass: the number of the forward pass that is under way,
    whatever it computes; None if none is.
    """

    computed: tuple[tuple[AttemptId, UInt], ...] = ()
    current_pass: UInt | None = None


class NotHeld(Message):
    """Prefill node to decode node: of these attempts nothing is in flight here. As good as Quiesced."""

    attempts: tuple[AttemptId, ...] = ()


class FetchRequest(Message):
    """Prefill node to decode node: let me read positions [start, stop), which lie before `PrefillRequest.start`.

    Repeated until FetchGrant or FetchRefused, or until the node does not want it any more.
    """

    attempt: AttemptId
    start: UInt
    stop: UInt

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.start >= self.stop:
            raise ValueError(f"nothing to read in [{self.start}, {self.stop})")
        return self


class FetchGrant(Message):
    """Decode node to prefill node: positions [start, stop) are here, and stay until the node has said FetchDone.

    extents: (start, length) runs of slots in the order of positions, for `start` and those behind it. checksums: of
    what lies there, all positions of all buffers.
    """

    attempt: AttemptId
    start: UInt
    stop: UInt
    extents: tuple[tuple[UInt, UInt], ...]
    checksums: Checksums


class FetchRefused(Message):
    """Decode node to prefill node: these positions may not be read, so they have to be computed."""

    attempt: AttemptId
    reason: str


class FetchDone(Message):
    """Prefill node to decode node: no read of this attempt is in flight, and none will follow. Sent once.

    Whatever says that no write is in flight says the same of reads.
    """

    attempt: AttemptId


# --- liveness: any two processes ----------------------------------------------------------------------------------


class Ping(Message):
    """Is this process alive? Its control thread answers, however busy the process is. Stable."""

    nonce: UInt


class Pong(Message):
    """The process lived after the ping with this nonce was sent; the sender says which boot it is. Stable."""

    nonce: UInt


_ANY: frozenset[type[Message]] = frozenset({Ping, Pong})
_NODE: frozenset[type[Message]] = _ANY | {Register, Heartbeat, Leaving, CacheUpdate}
SENT_BY: Mapping[Role, frozenset[type[Message]]] = {
    "gateway": _ANY | {Registered, Refused, HeartbeatAck, Generate, Ended, Resend, Cancel},
    "prefill": _NODE
    | {PrefillAccepted, ChunkDone, PrefillDone, PrefillFailed, Quiesced, NotHeld, Progress, FetchRequest, FetchDone},
    "decode": _NODE
    | {Accepted, Rejected, Outputs, PrefillRequest, ChunkTaken, Admitted, Abort, Holding, FetchGrant, FetchRefused},
}
"""What each role may send. Anything else from it is malformed."""
