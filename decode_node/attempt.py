"""An attempt to have a request's prompt prefilled by another node.

    REQUESTED -> ACCEPTED -> ANNOUNCED -> LANDED
            \\__________\\___________\\-> LOST

The reservation of its slots (`transfer/fencing.py`) and its `ReadLease` may outlive it, until no process can touch the
slots any more. The attempt stays in the `AttemptTable` for its lease.
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from base.tracing import NO_SPAN, TraceSpan
from control.messages import AttemptId, ChunkDone, Destination, FetchGrant, Peer, PrefillDone, PrefillRequest
from control.prompt_logprobs import PromptLogprobTable
from decode_node.request import Request
from kvcache.extents import NO_SLOTS, HostSlots
from transfer.planner import Int64s

ChunkNumber = int | None
"""Which chunk some checksums belong to. None: the last one, whose checksums come with PrefillDone."""


class AttemptState(Enum):
    """How far an attempt has come."""

    REQUESTED = "requested"
    """The node was asked and has not answered."""
    ACCEPTED = "accepted"
    """The node works on it."""
    ANNOUNCED = "announced"
    """The node has announced every chunk, and the verifier is at work: nothing depends on the node any more."""
    LANDED = "landed"
    """All KV is in host memory and verified."""
    LOST = "lost"
    """It failed, or the request no longer wants it."""


_NEXT = {
    AttemptState.REQUESTED: {AttemptState.ACCEPTED, AttemptState.LOST},
    AttemptState.ACCEPTED: {AttemptState.ANNOUNCED, AttemptState.LOST},
    AttemptState.ANNOUNCED: {AttemptState.LANDED, AttemptState.LOST},
    AttemptState.LANDED: set(),
    AttemptState.LOST: set(),
}


@dataclass
class ReadLease:
    """Slots of positions [0, stop) of an attempt, of which `readers` may read those from `start` on.

    readers: the prefill node and its ranks, without those that are dead or gone. grant: the message to the node, once
    the digests are known.
    """

    readers: list[Peer]
    slots: HostSlots
    start: int
    stop: int
    leased_at: float
    grant: FetchGrant | None = None

    def readers_of(self, boot_id: str) -> list[Peer]:
        """The reader that is that process, if one is."""
        return [reader for reader in self.readers if reader.boot_id == boot_id]


@dataclass(eq=False)
class PrefillAttempt:
    """The decode node's loop owns it.

    Chunks arrive in any order, each with its checksums. PrefillDone stands for the last chunk and has the number of
    chunks before it. Each chunk is taken once and verified in the background. A mismatch ends the attempt.
    """

    id: AttemptId
    request: Request
    node: Peer
    slots: HostSlots
    dispatched_at: float
    num_tokens: int
    """Tokens whose KV was asked for, those of `prefix` included."""
    prefix: HostSlots = NO_SLOTS
    """Slots of the positions before those of `slots`. They are not written."""
    prompt_logprobs: PromptLogprobTable | None = None
    """Collects log probabilities of the prompt, if the request asks for them."""
    ranks: tuple[Peer, ...] = ()
    """The node's other processes. They write and read, too."""
    span: TraceSpan = NO_SPAN
    """Of its request in state PREFILLING."""
    state: AttemptState = AttemptState.REQUESTED
    ended_at: float | None = None
    computed: int = 0
    """Tokens that the node has reported as computed."""
    current_pass: int | None = None
    """The forward pass that was running at that report."""
    done: PrefillDone | None = None
    lease: ReadLease | None = None
    """What the node may read of the prefix."""
    was_leased: bool = False
    """Whether there is or was a lease: there is at most one."""
    num_checksums: int = 0
    """Of all chunks that were taken."""
    progressed_at: float = field(init=False)
    """When it last made progress (time.monotonic)."""
    taken: set[ChunkNumber] = field(default_factory=set)
    _verified: set[ChunkNumber] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.progressed_at = self.dispatched_at

    @cached_property
    def positions(self) -> Int64s:
        """The slot of every position. Computed at first use, which may take milliseconds."""
        return self.prefix.extend(self.slots.extents).slots()

    def message(self, destination: Destination) -> PrefillRequest:
        request = self.request
        return PrefillRequest(
            attempt=self.id,
            token_ids=request.tokens[:-1],
            last_token_id=request.tokens[-1],
            start=len(self.prefix),
            destination=destination,
            extents=tuple((extent.start, extent.length) for extent in self.slots.extents),
            hisparse=True,
            cache_salt=request.generate.cache_salt,
            prompt_logprobs=None if self.prompt_logprobs is None else request.generate.prompt_logprobs,
            ranks=tuple(rank.boot_id for rank in self.ranks),
            # A node that makes no spans itself passes the gateway's context on.
            traceparent=self.span.traceparent or request.generate.traceparent,
        )

    @property
    def is_live(self) -> bool:
        """Whether its request waits for it."""
        return self.ended_at is None

    @property
    def needs_node(self) -> bool:
        """Whether it is lost if the node says nothing more."""
        return self.state in (AttemptState.REQUESTED, AttemptState.ACCEPTED)

    @property
    def is_verified(self) -> bool:
        """Whether every chunk was announced and matches its checksums."""
        return self.state is AttemptState.ANNOUNCED and len(self._verified) == len(self.taken)

    def move(self, to: AttemptState, now: float) -> None:
        """The only way in which the state changes. Raises RuntimeError if `to` cannot follow."""
        if to not in _NEXT[self.state]:
            raise RuntimeError(f"attempt {self.id} is {self.state.value} and cannot become {to.value}")
        self.state = to
        if not _NEXT[to]:
            self.ended_at = now

    def accept(self, now: float) -> None:
        """The node works on it. Only the first call counts."""
        if self.state is AttemptState.REQUESTED:
            self.move(AttemptState.ACCEPTED, now)
            self.progressed_at = now

    def note_progress(self, computed: int, current_pass: int | None, now: float) -> None:
        """Take the node's report. A new forward pass is progress, too: this attempt may wait for others.

        While the node sends, every report counts as progress, since the node has a transfer deadline of its own. After
        PrefillDone none does: only chunks are missing then, which the node must repeat.
        """
        is_sending = computed == self.num_tokens and self.done is None
        if is_sending or (computed, current_pass) != (self.computed, self.current_pass):
            self.progressed_at = now
        self.computed, self.current_pass = computed, current_pass

    def rejection_reason(self, message: ChunkDone | PrefillDone) -> str | None:
        """Why a message contradicts the request or earlier messages, or None."""
        if reason := self._reason_of_logprobs(message):
            return reason
        if isinstance(message, ChunkDone):
            return _beyond(message.number, self.num_tokens - 1 if self.done is None else self.done.chunks)
        if message.num_tokens != self.num_tokens:
            return f"prefill covered {message.num_tokens} tokens, not {self.num_tokens}"
        if message.chunks >= self.num_tokens:
            return f"{message.chunks} chunks before the last one, in {self.num_tokens} tokens"
        return _beyond(max((chunk for chunk in self.taken if chunk is not None), default=-1), message.chunks)

    def take(self, message: ChunkDone | PrefillDone, now: float) -> None:
        """Note a chunk that has landed and that the verifier has got. Without checksums it counts as verified."""
        chunk = chunk_of(message)
        self.taken.add(chunk)
        self.num_checksums += len(message.checksums)
        self.progressed_at = now
        for piece in message.prompt_logprobs:
            assert self.prompt_logprobs is not None, "`rejection_reason` was asked before"
            self.prompt_logprobs.add(piece)
        if isinstance(message, PrefillDone):
            self.done = message
        if not message.checksums:
            self._verified.add(chunk)
        if self.done is not None and len(self.taken) == self.done.chunks + 1:
            self.move(AttemptState.ANNOUNCED, now)

    def verified(self, chunk: ChunkNumber) -> None:
        """The chunk's checksums match. Raises RuntimeError if the chunk was never taken."""
        if chunk not in self.taken:
            raise RuntimeError(f"chunk {chunk} was verified and never taken")
        self._verified.add(chunk)

    def _reason_of_logprobs(self, message: ChunkDone | PrefillDone) -> str | None:
        if self.prompt_logprobs is None:
            return "log probabilities that were not asked for" if message.prompt_logprobs else None
        return next(filter(None, map(self.prompt_logprobs.rejection_reason, message.prompt_logprobs)), None)


class AttemptTable(dict[AttemptId, PrefillAttempt]):
    """Attempts that are live, and ended ones whose prefix may still be read."""

    @property
    def leases(self) -> list[tuple[PrefillAttempt, ReadLease]]:
        return [(attempt, attempt.lease) for attempt in self.values() if attempt.lease is not None]

    def drop_if_over(self, attempt: PrefillAttempt) -> None:
        """Forget an attempt that has ended and has no lease."""
        if not attempt.is_live and attempt.lease is None:
            del self[attempt.id]


def chunk_of(message: ChunkDone | PrefillDone) -> ChunkNumber:
    """Whose checksums a message has."""
    return message.number if isinstance(message, ChunkDone) else None


def _beyond(number: int, chunks: int) -> str | None:
    return f"chunk {number} landed, of {chunks} that there can be" if number >= chunks else None
