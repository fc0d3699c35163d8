"""What a prefill node keeps of a request that it works on."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from control.messages import (
    Checksum,
    Checksums,
    ChunkDone,
    ModelIdentity,
    Peer,
    PrefillDone,
    PrefillRequest,
    Token,
    Transport,
)
from engine.chunked import PrefillJob
from engine.convert import prompt_tensor, sampling_params
from prefill_node.outgoing import Sent
from transfer.planner import Int64s, expand_extents

Key = tuple[str, str, int]
"""Decode node's boot id, request id, epoch: a request that moves to another decode node keeps its id, and each decode
node counts epochs of its own."""


class State(Enum):
    """How far a request at the prefill node has come."""

    COMPUTING = "computing"
    """Its prompt waits or is being computed; what is computed goes out meanwhile."""
    SENDING = "sending"
    """All is computed, and some of it is still on its way."""
    DONE = "done"
    """All has landed. Its pages are kept until the decode node has admitted it."""
    STOPPING = "stopping"
    """It was given up: it ends when nothing of it is in flight."""


_NEXT = {
    State.COMPUTING: {State.SENDING, State.STOPPING},
    State.SENDING: {State.DONE, State.STOPPING},
    State.DONE: {State.STOPPING},
    State.STOPPING: set(),
}


@dataclass(eq=False)
class Entry:
    """One (request, epoch) that this node works on.

    `in_flight` counts the chunks being computed, those that the sender holds, and those of which nobody knows whether
    their writes have ended (which stay: the entry never ends). Pages are released when the entry
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
    """For how long something of it was being written. Chunks overlap: the next is posted before the last has ended."""
    written_until: float = 0.0
    chunks_done: int = 0
    """Chunks that the decode node is told of by themselves."""
    untaken: set[int] = field(default_factory=set)
    """The numbers of those that it has not answered yet."""
    last_checksums: list[Checksum] = field(default_factory=list)
    """Of the prompt's last chunk."""

    @classmethod
    def of(cls, key: Key, request: PrefillRequest, decode: Peer) -> Self:
        """What a decode node asks for, not begun yet."""
        job = PrefillJob(key, prompt_tensor(request.prompt_ids), sampling_params(request.sampling), request.step)
        return cls(request, decode, job, expand_extents(request.extents, len(request.prompt_ids)))

    @property
    def key(self) -> Key:
        return self.decode.boot_id, self.request.request_id, self.request.epoch

    @property
    def begun(self) -> bool:
        """Whether anything of it was computed or is being computed."""
        return self.job.computed > 0 or self.in_flight > 0 or self.state is not State.COMPUTING

    def move(self, to: State) -> None:
        """The only way in which the state changes. Raises RuntimeError if `to` cannot follow."""
        if to not in _NEXT[self.state]:
            raise RuntimeError(f"request {self.request.request_id} is {self.state.value} and cannot become {to.value}")
        self.state = to

    def landed(self, sent: Sent) -> ChunkDone | None:
        """Take note of a chunk of it that has landed.

        Returns what the decode node is to be told of it at once: its checksums, unless `done` tells it soon enough.
        """
        self.num_bytes += sent.num_bytes
        self.num_descriptors += sent.num_descriptors
        self.seconds += sent.seconds(since=self.written_until)
        self.written_until = sent.ended_at
        if sent.chunk.stop == len(self.request.prompt_ids):
            self.last_checksums = sent.checksums
            return None
        if not sent.checksums or self.state is State.STOPPING:
            return None
        number = self.chunks_done
        self.chunks_done += 1
        self.untaken.add(number)
        return ChunkDone(
            request_id=self.request.request_id,
            epoch=self.request.epoch,
            number=number,
            checksums=Checksums.of(sent.checksums),
        )

    def done(self, lingering: bool) -> PrefillDone:
        """What to tell the decode node when every write has landed. lingering: as in PrefillDone."""
        assert self.token is not None
        return PrefillDone(
            request_id=self.request.request_id,
            epoch=self.request.epoch,
            token=self.token,
            num_tokens=len(self.request.prompt_ids),
            transferred_bytes=self.num_bytes,
            descriptors=self.num_descriptors,
            transfer_seconds=self.seconds,
            chunks=self.chunks_done,
            checksums=Checksums.of(self.last_checksums),
            lingering=lingering,
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
