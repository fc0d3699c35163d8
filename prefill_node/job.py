"""One prefill attempt on this node: computed in chunks, and sent while it is computed."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import torch

from control.messages import AttemptId, Checksum, Checksums, Destination, Peer, PrefillRequest
from engine.chunked import PrefillJob
from prefill_node.engine import AllSent, ChunkSent
from prefill_node.outgoing import Sent
from transfer.planner import Int64s, expand_extents


class JobState(Enum):
    """How far an attempt at the prefill node has come."""

    COMPUTING = "computing"
    """Its prompt waits or is being computed; what is computed goes out meanwhile."""
    SENDING = "sending"
    """All is computed, and some of it is still on its way."""
    SENT = "sent"
    """All has landed. Its pages are kept until the decode node has admitted it."""
    STOPPING = "stopping"
    """It was given up: it ends when nothing of it is in flight."""


_NEXT = {
    JobState.COMPUTING: {JobState.SENDING, JobState.STOPPING},
    JobState.SENDING: {JobState.SENT, JobState.STOPPING},
    JobState.SENT: {JobState.STOPPING},
    JobState.STOPPING: set(),
}


@dataclass(eq=False)
class TransferJob(PrefillJob):
    """An attempt that this node works on.

    slots: int64 [num_tokens], where each position goes. `in_flight` counts the chunks being computed and those that
    the sender holds, and those of which nobody knows whether their writes have ended.
    Pages are released when the job ends, never earlier: until then they are written to or read.
    """

    attempt: AttemptId
    decode: Peer
    destination: Destination
    slots: Int64s
    state: JobState = JobState.COMPUTING
    in_flight: int = 0
    failure: str | None = None
    """Why it was given up; None if the decode node does not want it any more."""
    lingering: bool = False
    """A write of it was cut or given up, and the network may still carry it, also if it was repeated and landed."""
    computed_at: float | None = None
    """When the last chunk was computed (time.monotonic): what it waits for since then is its transfer."""
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    """For how long something of it was being written. Chunks overlap: the next is posted before the last has ended."""
    written_until: float = 0.0
    chunks_told: int = 0
    """Chunks that the decode node is told of by themselves."""
    last_checksums: list[Checksum] = field(default_factory=list)
    """Of the prompt's last chunk."""

    @classmethod
    def of(cls, request: PrefillRequest, decode: Peer) -> Self:
        """What a decode node asks for, not begun yet."""
        slots = expand_extents(request.extents, len(request.token_ids))
        return cls(torch.tensor(request.token_ids), request.attempt, decode, request.destination, slots)

    @property
    def begun(self) -> bool:
        """Whether anything of it was computed or is being computed."""
        return self.computed > 0 or self.in_flight > 0 or self.state is not JobState.COMPUTING

    def move(self, to: JobState) -> None:
        """The only way in which the state changes. Raises RuntimeError if `to` cannot follow."""
        if to not in _NEXT[self.state]:
            raise RuntimeError(f"attempt {self.attempt} is {self.state.value} and cannot become {to.value}")
        self.state = to

    def landed(self, sent: Sent) -> ChunkSent | None:
        """Take note of a chunk of it that has landed.

        Returns what the decode node is to be told of it at once: its checksums, unless `all_sent` tells it soon enough.
        """
        self.num_bytes += sent.num_bytes
        self.num_descriptors += sent.num_descriptors
        self.seconds += sent.seconds(since=self.written_until)
        self.written_until = sent.ended_at
        if sent.chunk.stop == self.num_tokens:
            self.last_checksums = sent.checksums
            return None
        if not sent.checksums or self.state is JobState.STOPPING:
            return None
        number = self.chunks_told
        self.chunks_told += 1
        return ChunkSent(self.attempt, number, Checksums.of(sent.checksums))

    def all_sent(self) -> AllSent:
        """What to tell the decode node when every write has landed."""
        return AllSent(
            attempt=self.attempt,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            descriptors=self.num_descriptors,
            seconds=self.seconds,
            chunks=self.chunks_told,
            checksums=Checksums.of(self.last_checksums),
            lingering=self.lingering,
        )
