"""What rank 0 of a prefill node and its other ranks tell each other. Every rank acts on orders in their order."""

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from control.messages import AttemptId, Peer, PrefillRequest
from prefill_node.fetch import FetchFailure, FetchReport
from prefill_node.outgoing import SendReport
from transfer.memory import Checksum, Checksums
from transfer.planner import Int64s


def _from_bytes(data: object) -> Int64s:
    if not isinstance(data, bytes):
        raise ValueError(f"expected the bytes of int64 numbers, found {type(data).__name__}")
    return np.frombuffer(data, dtype="<i8").astype(np.int64)


def _to_bytes(numbers: Int64s) -> bytes:
    return numbers.astype("<i8").tobytes()


PackedInt64s = Annotated[Int64s, PlainValidator(_from_bytes), PlainSerializer(_to_bytes)]
"""An array that is bytes on a line."""


@dataclass(frozen=True)
class Begin:
    """An attempt was taken. It is in steps from now on."""

    decode: Peer
    request: PrefillRequest


@dataclass(frozen=True)
class PlannedChunk:
    """Positions [start, stop) of an attempt. pages: of the whole attempt, the same numbers in the pools of all ranks.

    sequence_length: see PrefillChunk.
    """

    attempt: AttemptId
    start: int
    stop: int
    sequence_length: int
    pages: PackedInt64s


@dataclass(frozen=True)
class Step:
    """All ranks compute a forward pass over these chunks now, and each sends its block of them."""

    chunks: tuple[PlannedChunk, ...]


@dataclass(frozen=True)
class Read:
    """Read positions [start, stop) of an attempt from the decode node's `slots`, int64 [stop - start], into its pages.

    pages: of the whole attempt. checksums: of all these positions in all buffers. after: so many steps and gathers have
    ended at rank 0; what the rank has yet to do of these may write to the pages for whoever had them before, so it
    reads when it has ended as many.
    """

    attempt: AttemptId
    start: int
    stop: int
    pages: PackedInt64s
    slots: PackedInt64s
    checksums: Checksums
    after: int


@dataclass(frozen=True)
class StopReading:
    """Post no more reads of an attempt, which goes on."""

    attempt: AttemptId


@dataclass(frozen=True)
class DividedPrefix:
    """Positions of an attempt that ranks have read: rank r those of [bounds[r], bounds[r + 1]), which may be none.

    pages: of the whole attempt.
    """

    pages: PackedInt64s
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Gather:
    """All ranks exchange what they have read of these prefixes, and verified, now."""

    prefixes: tuple[DividedPrefix, ...]


@dataclass(frozen=True)
class Stop:
    """Post no more of an attempt. It is in no further step."""

    attempt: AttemptId


@dataclass(frozen=True)
class Forget:
    """Nothing of an attempt is in flight in any rank, and nothing of it follows."""

    attempt: AttemptId


@dataclass(frozen=True)
class Connected:
    """Lanes to other decode nodes than these (boot ids) may be closed."""

    decode_nodes: frozenset[str]


@dataclass(frozen=True)
class End:
    """The node ends in peace: nothing is in flight."""


Order = Begin | Step | Read | StopReading | Gather | Stop | Forget | Connected | End


@dataclass(frozen=True)
class PartSent:
    """A rank's word that all writes of its block of a chunk have ended: what a SendReport says, for rank 0.

    Times are those of rank 0's clock.
    """

    attempt: AttemptId
    start: int
    num_bytes: int
    num_descriptors: int
    posted_at: float | None
    ended_at: float
    waited: float
    checksums: list[Checksum]
    error: str | None
    lingering: bool
    in_flight: bool

    @classmethod
    def of(cls, report: SendReport, clock_ahead: float = 0.0) -> Self:
        """clock_ahead: seconds by which rank 0's clock is ahead of this rank's."""
        return cls(
            attempt=report.chunk.attempt,
            start=report.chunk.start,
            num_bytes=report.num_bytes,
            num_descriptors=report.num_descriptors,
            posted_at=None if report.posted_at is None else report.posted_at + clock_ahead,
            ended_at=report.ended_at + clock_ahead,
            waited=report.waited,
            checksums=report.checksums,
            error=report.error,
            lingering=report.lingering,
            in_flight=report.in_flight,
        )


@dataclass(frozen=True)
class PartRead:
    """A rank's word that all reads of its block of a prefix have ended: what a FetchReport says, for rank 0."""

    attempt: AttemptId
    num_bytes: int
    seconds: float
    error: str | None
    failure: FetchFailure | None
    in_flight: bool

    @classmethod
    def of(cls, report: FetchReport) -> Self:
        return cls(
            attempt=report.fetch.attempt,
            num_bytes=report.num_bytes,
            seconds=report.seconds,
            error=report.error,
            failure=report.failure,
            in_flight=report.in_flight,
        )


PartReport = PartSent | PartRead
