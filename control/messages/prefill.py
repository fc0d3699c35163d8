"""Between decode nodes and prefill nodes: attempts to prefill a request, and prefixes read from decode nodes."""

from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from base.wire import Identifier, UInt, WireModel
from control.messages.common import (
    DECODE,
    MAX_ATTEMPTS,
    MAX_RANKS,
    PREFILL,
    CacheSalt,
    Message,
    ModelIdentity,
    TokenId,
    TokenIds,
    TraceParent,
)
from control.prompt_logprobs import Alternatives, PromptLogprobs
from transfer.memory import Checksums, RemotePool


class AttemptId(NamedTuple):
    """One try to prefill a request. decode: boot id of the decode node. epoch: counts its tries, from 1."""

    decode: Identifier
    request_id: Identifier
    epoch: UInt

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Another number of elements is one error; by default, each element beyond is one."""
        three = core_schema.tuple_schema([core_schema.any_schema()] * len(cls._fields))
        return core_schema.chain_schema([three, handler(source)])

    @property
    def log_fields(self) -> dict[str, object]:
        """What log lines name of it."""
        return {"request_id": self.request_id, "epoch": self.epoch}


class AttemptMessage(WireModel):
    """What messages about one attempt have in common."""

    attempt: AttemptId


class Destination(RemotePool):
    """A decode node's pool. identity: what its KV has to be."""

    identity: ModelIdentity


class PrefillRequest(AttemptMessage, Message, sent_by=DECODE):
    """Decode node to prefill node: compute these tokens and write their KV, from position `start` on, to these slots.

    Repeated until PrefillAccepted.
    """

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    last_token_id: TokenId
    start: UInt = 0
    destination: Destination
    extents: tuple[tuple[UInt, UInt], ...]
    hisparse: bool = False
    cache_salt: CacheSalt = ""
    prompt_logprobs: Alternatives | None = None
    ranks: Annotated[tuple[Identifier, ...], Field(max_length=MAX_RANKS)] = ()
    traceparent: TraceParent = ""

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


class PrefillAccepted(AttemptMessage, Message, sent_by=PREFILL):
    """Prefill node to decode node: it has the request, or had it before."""


class ChunkDone(AttemptMessage, Message, sent_by=PREFILL):
    """Prefill node to decode node: every write of a chunk before the last was confirmed. Repeated until ChunkTaken.

    Only chunks with checksums or log probabilities have one.
    """

    number: UInt
    checksums: Checksums
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class ChunkTaken(AttemptMessage, Message, sent_by=DECODE):
    """Decode node to prefill node: that ChunkDone has arrived. Its checksums may not be verified yet."""

    number: UInt


class PrefillDone(AttemptMessage, Message, sent_by=PREFILL):
    """Prefill node to decode node: every write was confirmed, and nothing is in flight. Repeated until Admitted."""

    num_tokens: UInt
    transferred_bytes: UInt = 0
    descriptors: UInt = 0
    transfer_seconds: Annotated[float, Field(ge=0)] = 0.0
    chunks: UInt = 0
    checksums: Checksums = Checksums()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    lingering: bool = False
    cached_tokens: UInt = 0


class PrefillFailed(AttemptMessage, Message, sent_by=PREFILL):
    """Prefill node to decode node: the attempt will not be completed here.

    With `in_flight` it is repeated until Abort, and Quiesced follows. Otherwise it implies Quiesced.
    """

    reason: str
    in_flight: bool = False
    lingering: bool = False
    leaving: bool = False
    refused: bool = False


class Admitted(AttemptMessage, Message, sent_by=DECODE):
    """Decode node to prefill node: the KV is here and verified, or not wanted any more. Its source pages may go."""


class Abort(AttemptMessage, Message, sent_by=DECODE):
    """Decode node to prefill node: stop writing. Repeated until Quiesced."""


class Quiesced(AttemptMessage, Message, sent_by=PREFILL):
    """Prefill node to decode node: no write of this attempt is in flight, and none will follow."""

    lingering: bool = False


class Holding(Message, sent_by=DECODE):
    """Decode node to prefill node: how far are these attempts? Answered by Progress, and NotHeld or Quiesced."""

    attempts: Annotated[tuple[AttemptId, ...], Field(max_length=MAX_ATTEMPTS)] = ()


class Progress(Message, sent_by=PREFILL):
    """Prefill node to decode node: how far it is with the attempts that it was asked about and holds."""

    computed: Annotated[tuple[tuple[AttemptId, UInt], ...], Field(max_length=MAX_ATTEMPTS)] = ()
    current_pass: UInt | None = None


class NotHeld(Message, sent_by=PREFILL):
    """Prefill node to decode node: of these attempts nothing is in flight here. As good as Quiesced."""

    attempts: Annotated[tuple[AttemptId, ...], Field(max_length=MAX_ATTEMPTS)] = ()


class FetchRequest(AttemptMessage, Message, sent_by=PREFILL):
    """Prefill node to decode node: let me read positions [start, stop), which lie before `PrefillRequest.start`.

    Repeated until FetchGrant or FetchRefused, or until the node does not want it any more.
    """

    start: UInt
    stop: UInt

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.start >= self.stop:
            raise ValueError(f"nothing to read in [{self.start}, {self.stop})")
        return self


class FetchGrant(AttemptMessage, Message, sent_by=DECODE):
    """Decode node to prefill node: positions [start, stop) are here, and stay until the node has said FetchDone."""

    start: UInt
    stop: UInt
    extents: tuple[tuple[UInt, UInt], ...]
    checksums: Checksums


class FetchRefused(AttemptMessage, Message, sent_by=DECODE):
    """Decode node to prefill node: these positions may not be read, so they have to be computed."""

    reason: str


class FetchDone(AttemptMessage, Message, sent_by=PREFILL):
    """Prefill node to decode node: no read of this attempt is in flight, and none will follow. Sent once.

    Whatever says that no write is in flight says the same of reads.
    """
