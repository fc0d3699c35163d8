"""One prefill attempt at the prefill node: computed in chunks, and sent while it is computed."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import torch

from control.messages import AttemptId, ChunkDone, Destination, Peer, PrefillDone, PrefillRequest
from control.prompt_logprobs import PromptLogprobs
from engine.chunked import PrefillJob
from prefill_node.arrival import PrefixArrival
from prefill_node.outgoing import Chunk, SendReport
from prefill_node.progress import ForwardProgress
from transfer.memory import Checksum, Checksums
from transfer.planner import Int64s, expand_extents


class JobState(Enum):
    """How far an attempt at the prefill node has come."""

    COMPUTING = "computing"
    """Its prompt waits or is being computed; computed layers are sent meanwhile."""
    FETCHING = "fetching"
    """A prefix of its prompt is asked for or read, back from the decode node. Until that is over it computes nothing,
    or what comes behind the prefix in one pass that waits for each layer of it (`TransferJob.arriving`)."""
    SENDING = "sending"
    """All is computed, and writes are in flight."""
    SENT = "sent"
    """All has landed. Its pages are kept until the decode node confirms that."""
    STOPPING = "stopping"
    """It was given up, and ends when nothing of it is in flight."""


_NEXT = {
    JobState.COMPUTING: {JobState.FETCHING, JobState.SENDING, JobState.STOPPING},
    JobState.FETCHING: {JobState.COMPUTING, JobState.STOPPING},
    JobState.SENDING: {JobState.SENT, JobState.STOPPING},
    JobState.SENT: {JobState.STOPPING},
    JobState.STOPPING: set(),
}


@dataclass(frozen=True, eq=False)
class ArrivingPrefix:
    """A prefix that a job's next pass, or the one that is under way, waits for layer by layer.

    patience: seconds that the pass may wait. chunks: what it computes, to be sent when all of the prefix is verified.
    """

    arrival: PrefixArrival
    patience: float
    chunks: list[Chunk] = field(default_factory=list)


@dataclass(eq=False)
class TransferJob(PrefillJob):
    """An attempt that this node works on.

    start: the first position that is sent; the decode node has those before it. slots: int64 [num_tokens - start], the
    destination of each position from `start` on. in_flight: chunks being computed, plus chunks that the sender has,
    plus a fetch that the fetcher has, plus chunks and fetches of unknown end. fetched: tokens that were fetched. Pages
    are released when the job ends and never earlier, since they are written and read until then.
    """

    attempt: AttemptId
    decode: Peer
    destination: Destination
    start: int
    slots: Int64s
    state: JobState = JobState.COMPUTING
    in_flight: int = 0
    fetched: int = 0
    arriving: ArrivingPrefix | None = None
    failure: str | None = None
    """Why it was given up; None if the decode node aborted it."""
    lingering: bool = False
    """A write was cut or given up, and the network may still carry it, even if it was repeated and landed."""
    computed_at: float | None = None
    """When the last chunk was computed (time.monotonic). From then on it waits for its transfer only."""
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    """How long something of it was being written. Chunks overlap: one is posted before the one before has ended."""
    written_until: float = 0.0
    chunks_announced: int = 0
    """Chunks that have a ChunkDone of their own."""
    last_checksums: list[Checksum] = field(default_factory=list)
    """Of the prompt's last chunk."""
    unsent_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Those that were computed and are in no message yet."""

    @classmethod
    def of(cls, request: PrefillRequest, decode: Peer) -> Self:
        slots = expand_extents(request.extents, len(request.token_ids) - request.start)
        job = cls(
            torch.tensor(request.token_ids),
            request.attempt,
            decode,
            request.destination,
            request.start,
            slots,
            prompt_logprobs=request.prompt_logprobs,
            last_token=request.last_token_id,
        )
        job.salt = request.cache_salt
        return job

    def move(self, to: JobState) -> None:
        """The only way in which the state changes. Raises RuntimeError if `to` cannot follow."""
        if to not in _NEXT[self.state]:
            raise RuntimeError(f"attempt {self.attempt} is {self.state.value} and cannot become {to.value}")
        self.state = to

    def chunk(self, start: int, stop: int, progress: ForwardProgress) -> Chunk | None:
        """Those of positions [start, stop) that are sent, for the sender; None if the decode node has all of them.

        progress: of the forward pass that computes them, or one that is over.
        """
        assert self.pages is not None
        if stop <= self.start:
            return None
        return Chunk(
            attempt=self.attempt,
            start=max(start, self.start),
            stop=stop,
            pages=self.pages,
            slots=self.slots,
            slots_start=self.start,
            decode=self.decode,
            destination=self.destination,
            progress=progress,
            cancelled=lambda: self.state is JobState.STOPPING,
        )

    def landed(self, report: SendReport) -> ChunkDone | None:
        """Count a chunk that has landed. Returns what the decode node needs of it, unless `done` brings that."""
        self.num_bytes += report.num_bytes
        self.num_descriptors += report.num_descriptors
        self.seconds += report.seconds(since=self.written_until)
        self.written_until = report.ended_at
        if report.chunk.stop == self.num_tokens:
            self.last_checksums = report.checksums
            return None
        if self.state is JobState.STOPPING or not (report.checksums or self.unsent_logprobs):
            return None
        number = self.chunks_announced
        self.chunks_announced += 1
        return ChunkDone(
            attempt=self.attempt,
            number=number,
            checksums=Checksums.of(report.checksums),
            prompt_logprobs=self._take_logprobs(),
        )

    def done(self) -> PrefillDone:
        """What the decode node needs to know when every write has landed."""
        return PrefillDone(
            attempt=self.attempt,
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

    def _take_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """A chunk may land before its log probabilities are computed: then a later message brings them."""
        taken = tuple(self.unsent_logprobs)
        self.unsent_logprobs.clear()
        return taken
