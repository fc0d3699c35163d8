"""What a prefill node keeps of a request that it works on."""

from dataclasses import dataclass, field
from enum import Enum

from prefill_node.chunked import PrefillJob
from transfer.messages import Checksum, ModelIdentity, Peer, PrefillDone, PrefillRequest, Token, Transport
from transfer.planner import Int64s

Key = tuple[str, str, int]
"""Decode node's boot id, request id, epoch: a request that moves to another decode node keeps its id, and each decode
node counts epochs of its own."""


class State(Enum):
    """A request at the prefill node. Every state but DONE may turn into STOPPING."""

    COMPUTING = "computing"
    SENDING = "sending"
    DONE = "done"
    STOPPING = "stopping"


@dataclass(eq=False)
class Entry:
    """One (request, epoch) that this node works on.

    `in_flight` counts the chunks being computed and those that the sender holds. Pages are released when the entry
    ends, never earlier: until then they are written to or read.
    """

    request: PrefillRequest
    decode: Peer
    job: PrefillJob[Key]
    slots: Int64s
    state: State = State.COMPUTING
    in_flight: int = 0
    token: Token | None = None
    failure: str | None = None
    computed_at: float | None = None
    """When the last chunk was computed (time.monotonic): what it waits for since then is its transfer."""
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    checksums: list[Checksum] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.decode.boot_id, self.request.request_id, self.request.epoch

    @property
    def begun(self) -> bool:
        """Whether anything of it was computed or is being computed."""
        return self.job.computed > 0 or self.in_flight > 0 or self.state is not State.COMPUTING

    def done(self) -> PrefillDone:
        """What to tell the decode node when every write has landed."""
        assert self.token is not None
        return PrefillDone(
            request_id=self.request.request_id,
            epoch=self.request.epoch,
            token=self.token,
            num_tokens=len(self.request.prompt_ids),
            transferred_bytes=self.num_bytes,
            descriptors=self.num_descriptors,
            transfer_seconds=self.seconds,
            checksums=tuple(self.checksums),
        )


@dataclass(frozen=True)
class Offer:
    """What a prefill node can do. `max_tokens`: the longest prompt that it takes."""

    identity: ModelIdentity
    transports: tuple[Transport, ...]
    max_tokens: int
    vocab_size: int

    def refusal(self, request: PrefillRequest) -> str | None:
        """Why a request cannot be done here, naming both values, or None."""
        destination = request.destination
        num_tokens = len(request.prompt_ids)
        expected = self.identity.num_layers * (self.identity.item_bytes,)
        expected += self.identity.num_index_layers * (self.identity.index_key_bytes,)
        if not request.hisparse:
            return "hisparse=false: this node does not write KV to resident device pages"
        if difference := self.identity.differences(destination.identity):
            return f"model mismatch, prefill != decode: {difference}"
        if not set(self.transports) & set(destination.transports):
            here, there = "|".join(self.transports), "|".join(destination.transports)
            return f"no transport in common: {here} here, {there} at the decode node"
        if destination.buffers.item_lengths != expected:
            return f"destination item lengths {destination.buffers.item_lengths} != {expected}"
        if num_tokens > self.max_tokens:
            return f"prompt of {num_tokens} tokens; this node takes up to {self.max_tokens}"
        if max(request.prompt_ids) >= self.vocab_size:
            return f"token id {max(request.prompt_ids)} is outside the vocabulary of {self.vocab_size}"
        return None
