"""One attempt to prefill a request at the prefill node, from its first message to its last.

The endpoint, the planner and the policy of fetches share it on one loop. Its steps and transfers in flight are known by
numbers (`prefill_node/orders.py`). Its pages are written and read until it ends, and are released then.
"""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import torch

from base.tracing import NO_SPAN, TraceSpan
from control import messages
from control.messages import AttemptId, ChunkDone, Peer, PrefillDone, PrefillFailed, PrefillRequest
from control.prompt_logprobs import PromptLogprobs
from engine.chunked import PrefillJob
from prefill_node.orders import BlockToSend, LayersRead, TransferReport
from transfer.memory import Checksum, Checksums
from transfer.planner import Int64s, expand_extents

Update = ChunkDone | PrefillDone | PrefillFailed | messages.Quiesced | messages.FetchRequest | messages.FetchDone
"""Messages about an attempt to its decode node.

FetchRequest asks for KV that the decode node has; FetchDone says that none is read any more, and ends the asking.
After PrefillDone the attempt keeps its KV until it is released. After PrefillFailed with `in_flight` another follows
when nothing is in flight. After PrefillFailed without it, or Quiesced, nothing is left of it.
"""


class HeldState(Enum):
    """How far an attempt at the prefill node has come."""

    COMPUTING = "computing"
    """Its prompt waits or is being computed; computed layers are sent meanwhile."""
    WAITING = "waiting for the fetch of another"
    """Another attempt fetches what it lacks. It computes nothing, as in all states of a fetch but one."""
    ASKING = "asking"
    """The decode node was asked for a prefix of its prompt."""
    READING = "reading"
    JOINED = "joined"
    """Its prefix is being read, and it is in one step, which waits for each layer of that."""
    LATE = "late"
    """Its prefix is being read, and did not come in time for that step. It joins no other."""
    READ = "read"
    """Every rank has read its block. They exchange them in the next step."""
    GATHERING = "gathering"
    DROPPED = "dropped"
    """Its prefix took too long. It computes once nothing is read any more."""
    SENDING = "sending"
    """All is computed, and writes are in flight."""
    SENT = "sent"
    """All has landed. Its pages are kept until the decode node confirms that."""
    STOPPING = "stopping"
    """It was given up, and ends when nothing of it is in flight."""
    ENDED = "ended"
    """Its pages are back. The last thing that its decode node has to hear is about to be sent."""

    @property
    def is_fetching(self) -> bool:
        return self in _FETCHING

    @property
    def label(self) -> str:
        """For metrics, where a fetch is one state."""
        return "fetching" if self.is_fetching else self.value


_STOP = frozenset({HeldState.STOPPING})
_GO_ON = _STOP | {HeldState.COMPUTING}
_NEXT: dict[HeldState, frozenset[HeldState]] = {
    HeldState.COMPUTING: _STOP | {HeldState.WAITING, HeldState.ASKING, HeldState.SENDING},
    HeldState.WAITING: _GO_ON,
    HeldState.ASKING: _GO_ON | {HeldState.READING},
    HeldState.READING: _GO_ON | {HeldState.JOINED, HeldState.READ, HeldState.DROPPED},
    HeldState.JOINED: _GO_ON | {HeldState.LATE, HeldState.DROPPED},
    HeldState.LATE: _GO_ON | {HeldState.DROPPED},
    HeldState.READ: _GO_ON | {HeldState.GATHERING},
    HeldState.GATHERING: _GO_ON,
    HeldState.DROPPED: _GO_ON | {HeldState.READ},
    HeldState.SENDING: _STOP | {HeldState.SENT},
    HeldState.SENT: _STOP | {HeldState.ENDED},
    HeldState.STOPPING: frozenset({HeldState.ENDED}),
    HeldState.ENDED: frozenset(),
}
_FETCHING = frozenset(state for state in HeldState if HeldState.COMPUTING in _NEXT[state])


@dataclass(eq=False)
class PrefixFetch:
    """Positions [start, stop) of an attempt that are fetched, from the question to the end of all reads.

    by: the attempt that asks and reads, which another with the same prefix waits for. until: when it is given up. work:
    its number, once it is read. patience: seconds that the step which it has joined may wait. withheld: positions that
    this step computes, and its number, to be sent when all of the prefix is verified. bounds: see DividedPrefix.
    report, read_at: what became of the reads, and when they had ended, until ranks have exchanged what they read.
    waited: seconds in which that could not begin, since a step was under way.
    """

    by: "HeldAttempt"
    start: int
    stop: int
    asked_at: float
    until: float
    work: int | None = None
    layers: LayersRead | None = None
    patience: float = 0.0
    withheld: list[tuple[int, int, int]] = field(default_factory=list)
    bounds: tuple[int, ...] = ()
    report: TransferReport | None = None
    read_at: float = 0.0
    waited: float = 0.0


@dataclass(eq=False)
class HeldAttempt(PrefillJob):
    """start: the first position that is sent; the decode node has those before it. slots: int64 [num_tokens - start],
    the destination of each position from `start` on. in_flight: numbers of steps that compute something of it, and of
    chunks and prefixes that are sent and read; those of unknown end stay. handed: the positions before it were handed
    over to be sent, or are computed by the step that is under way. repeated: keys of messages that are repeated to the
    decode node. fetched: tokens that were fetched.
    """

    id: AttemptId
    decode: Peer
    destination: messages.Destination
    start: int
    slots: Int64s
    state: HeldState = HeldState.COMPUTING
    in_flight: set[int] = field(default_factory=set)
    handed: int = 0
    repeated: set[Hashable] = field(default_factory=set)
    fetch: PrefixFetch | None = None
    fetched: int = 0
    failure: str | None = None
    """Why it was given up; None if the decode node aborted it."""
    lingering: bool = False
    """A write was cut or given up, and the network may still carry it, even if it was repeated and landed."""
    arrived_at: float = field(default_factory=time.monotonic)
    begun_at: float | None = None
    """When the first of it began to be fetched or computed, or all of it was found (time.monotonic)."""
    computed_at: float = 0.0
    """When the last chunk was computed (time.monotonic). From then on it waits for its transfer only."""
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    """How long something of it was being written. Chunks overlap: one is posted before the one before has ended."""
    written_from: float | None = None
    written_until: float = 0.0
    span: TraceSpan = NO_SPAN
    chunks_announced: int = 0
    """Chunks that have a ChunkDone of their own."""
    last_checksums: list[Checksum] = field(default_factory=list)
    """Of the prompt's last chunk."""
    unsent_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Those that were computed and are in no message yet."""

    @classmethod
    def of(cls, request: PrefillRequest, decode: Peer, span: TraceSpan = NO_SPAN) -> Self:
        slots = expand_extents(request.extents, len(request.token_ids) - request.start)
        attempt = cls(
            torch.tensor((*request.token_ids, request.last_token_id)),
            request.attempt,
            decode,
            request.destination,
            request.start,
            slots,
            prompt_logprobs=request.prompt_logprobs,
            span=span,
        )
        attempt.salt = request.cache_salt
        return attempt

    @property
    def is_paused(self) -> bool:
        return self.state.is_fetching and self.state is not HeldState.JOINED

    @property
    def has_begun(self) -> bool:
        """Whether any token was computed or is being computed."""
        return self.computed > 0 or bool(self.in_flight) or self.state is not HeldState.COMPUTING

    def move(self, to: HeldState) -> None:
        """The only way in which the state changes. Raises RuntimeError if `to` cannot follow."""
        if to not in _NEXT[self.state]:
            raise RuntimeError(f"attempt {self.id} is {self.state.value} and cannot become {to.value}")
        self.begin()
        self.state = to

    def begin(self) -> None:
        """It waits no longer for its turn. Only the first call counts."""
        if self.begun_at is None:
            self.begun_at = time.monotonic()
            self.span.record("queue", self.arrived_at, self.begun_at)

    def leave_step(self) -> None:
        """What a step computes of it, or will, after a prefix that is not all there, does not count."""
        if self.fetch is not None and self.state is HeldState.JOINED:
            self.computed = self.handed = self.fetch.start
            self.fetch.withheld.clear()

    def write(self, work: int, start: int, stop: int, step: int | None) -> BlockToSend:
        """Positions [start, stop), to be sent. The decode node does not have them. step: that computes them, if any."""
        assert self.pages is not None
        slots = self.slots[start - self.start : stop - self.start]
        return BlockToSend(work, self.id, self.decode, self.destination, start, stop, self.pages, slots, step)

    def landed(self, stop: int, report: TransferReport) -> ChunkDone | None:
        """Count a chunk up to `stop` that has landed. Returns what the decode node needs of it, unless `done` does."""
        self.num_bytes += report.num_bytes
        self.num_descriptors += report.num_descriptors
        self.seconds += report.seconds(since=self.written_until)
        self.written_from = self.written_from or report.posted_at
        self.written_until = report.ended_at
        if stop == self.num_tokens:
            self.last_checksums = report.checksums
            return None
        if self.state is HeldState.STOPPING or not (report.checksums or self.unsent_logprobs):
            return None
        number = self.chunks_announced
        self.chunks_announced += 1
        return ChunkDone(
            attempt=self.id,
            number=number,
            checksums=Checksums.of(report.checksums),
            prompt_logprobs=self._take_logprobs(),
        )

    def done(self) -> PrefillDone:
        """What the decode node needs to know when every write has landed."""
        return PrefillDone(
            attempt=self.id,
            num_tokens=self.num_tokens,
            transferred_bytes=self.num_bytes,
            descriptors=self.num_descriptors,
            transfer_seconds=self.seconds,
            chunks=self.chunks_announced,
            checksums=Checksums.of(self.last_checksums),
            prompt_logprobs=self._take_logprobs(),
            lingering=self.lingering,
            cached_tokens=self.cached + self.fetched,
        )

    def failed(self, reason: str) -> PrefillFailed:
        return PrefillFailed(attempt=self.id, reason=reason, in_flight=bool(self.in_flight), lingering=self.lingering)

    def _take_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """A chunk may land before its log probabilities are computed: then a later message brings them."""
        taken = tuple(self.unsent_logprobs)
        self.unsent_logprobs.clear()
        return taken
