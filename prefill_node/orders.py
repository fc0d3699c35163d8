"""What the planner of a prefill node orders its workers to do, and what they report.

Every worker acts on orders in their order. Steps, chunks that are sent and prefixes that are read have numbers, which
all ranks use: a number means one thing as long as the node lives.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Self, get_args

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from base.device import DeviceFailed
from base.metrics import FetchFailure
from control.messages import AttemptId, Destination, Peer
from control.prompt_logprobs import PromptLogprobs
from ranks.executor import DataclassCodec, LineCodec
from transfer.memory import Checksum, Checksums
from transfer.planner import Int64s


def _from_bytes(data: object) -> Int64s:
    if not isinstance(data, bytes):
        raise ValueError(f"expected the bytes of int64 numbers, found {type(data).__name__}")
    return np.frombuffer(data, dtype="<i8").astype(np.int64)


def _to_bytes(numbers: Int64s) -> bytes:
    return numbers.astype("<i8").tobytes()


PackedInt64s = Annotated[Int64s, PlainValidator(_from_bytes), PlainSerializer(_to_bytes)]
"""An array that is bytes on a line between ranks."""

# --- orders ---


@dataclass(frozen=True, eq=False)
class TransferBlock:
    """Positions [start, stop) of an attempt: in `pages` here, in `slots`, int64 [stop - start], at the decode node.

    work: number of the chunk or prefix of which this is one rank's block. pages: of the whole attempt.
    """

    work: int
    attempt: AttemptId
    decode: Peer
    destination: Destination
    start: int
    stop: int
    pages: PackedInt64s
    slots: PackedInt64s


@dataclass(frozen=True, eq=False)
class BlockToSend(TransferBlock):
    """To be written to the decode node. It is in the pages already, or the step of number `step` computes it, which may
    be under way."""

    step: int | None = None


@dataclass(frozen=True, eq=False)
class BlockToRead(TransferBlock):
    """To be read from the decode node.

    checksums: of all these positions in all buffers. after: how many steps had ended at rank 0; what a slower rank has
    yet to do of these may write to the pages for an attempt that had them before, so it reads when as many have ended
    there. reports_layers: whether the planner wants to know which layers have come.
    """

    checksums: Checksums
    after: int
    reports_layers: bool


@dataclass(frozen=True, eq=False)
class StepChunk:
    """Tokens of an attempt, int64 [n], at positions from `start` on.

    next_ids, sequence_length: see PrefillChunk. pages: of the whole attempt, the same numbers in the pools of all
    ranks. alternatives: to each token, if the attempt asks for log probabilities. awaits: the number of a prefix that
    is being read, of which the step waits for each layer.
    """

    token_ids: PackedInt64s
    next_ids: PackedInt64s
    start: int
    sequence_length: int
    pages: PackedInt64s
    alternatives: int | None = None
    awaits: int | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """Compute a forward pass over these chunks, which are those of all ranks, and send `writes` as layers are done.

    writes: this rank's blocks. patience: seconds that the pass may wait for prefixes.
    """

    number: int
    chunks: tuple[StepChunk, ...]
    writes: tuple[BlockToSend, ...]
    patience: float = 0.0


@dataclass(frozen=True)
class DividedPrefix:
    """Positions of an attempt that ranks have read: rank r those of [bounds[r], bounds[r + 1]), which may be none.

    pages: of the whole attempt.
    """

    pages: PackedInt64s
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Gather:
    """Exchange with the other ranks what each has read of these prefixes, and verified, in a step of its own."""

    number: int
    prefixes: tuple[DividedPrefix, ...]


@dataclass(frozen=True)
class CancelTransfers:
    """Post nothing more of these chunks and prefixes; a worker may have ended them, or have no block of them."""

    works: tuple[int, ...]


@dataclass(frozen=True)
class Serve:
    """These decode nodes have attempts here, and no others: connections to others may be closed."""

    decode_nodes: tuple[Peer, ...]


@dataclass(frozen=True)
class End:
    """The node ends in peace: nothing is in flight."""


Order = Step | BlockToSend | BlockToRead | Gather | CancelTransfers | Serve | End

# --- reports ---


@dataclass(frozen=True)
class StepEnded:
    """A step or a gather has ended, or failed with an error. device_failed: the device does not work any more.

    prompt_logprobs: those that were wanted, by the number of the chunk. void: numbers of chunks that count for nothing,
    since the prefix before them did not come in time.
    """

    number: int
    error: str | None = None
    device_failed: DeviceFailed | None = None
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    void: frozenset[int] = frozenset()


@dataclass
class TransferReport:
    """All writes or reads of a block have ended. They landed, and reads are verified, unless `error` says why not.

    in_flight: it is not known of some whether they have ended. They may use the block's pages and slots for as long as
    this process runs (`transfer.writer.Outcome.UNKNOWN`); `error` is set. lingering: the network may still carry bytes
    of writes that failed, or a first copy of writes that were repeated. posted_at, ended_at: of the first and the last
    (time.monotonic). waited: seconds in between in which there was nothing to post, or posting was not allowed.
    checksums: of what was written. in_time: of a prefix, whether a pass that waits for it may use it.
    """

    work: int
    num_bytes: int = 0
    num_descriptors: int = 0
    posted_at: float | None = None
    ended_at: float = 0.0
    waited: float = 0.0
    checksums: list[Checksum] = field(default_factory=list)
    error: str | None = None
    failure: FetchFailure | None = None
    lingering: bool = False
    in_flight: bool = False
    in_time: bool = True

    def seconds(self, since: float = 0.0) -> float:
        """How long it went on, not counting time before `since`."""
        if self.posted_at is None:
            return 0.0
        return max(0.0, self.ended_at - max(self.posted_at, since) - self.waited)

    def by_clock(self, ahead: float) -> Self:
        """With times of a clock that is `ahead` seconds ahead of this one."""
        posted_at = None if self.posted_at is None else self.posted_at + ahead
        return replace(self, posted_at=posted_at, ended_at=self.ended_at + ahead)


@dataclass(frozen=True)
class LayersRead:
    """The first `layers` layers of a prefix are in the pages, and verified, but for the last layer.

    began_at, at: when reading began, and now (time.monotonic).
    """

    work: int
    layers: int
    began_at: float
    at: float


Report = StepEnded | TransferReport | LayersRead


def merged(reports: list[TransferReport]) -> TransferReport:
    """One report of all blocks of a chunk or prefix, of which there is at least one.

    It has landed if all of them have. What failed first says why not, unless it is not known whether something has
    ended; that a block was aborted says least.
    """
    failed = [report for report in reports if report.error is not None]
    first = min(failed, key=lambda report: (not report.in_flight, report.error == "aborted"), default=None)
    return TransferReport(
        reports[0].work,
        num_bytes=sum(report.num_bytes for report in reports),
        num_descriptors=sum(report.num_descriptors for report in reports),
        posted_at=min((report.posted_at for report in reports if report.posted_at is not None), default=None),
        ended_at=max(report.ended_at for report in reports),
        waited=min(report.waited for report in reports),
        checksums=[checksum for report in reports for checksum in report.checksums],
        error=None if first is None else first.error,
        failure=None if first is None else first.failure,
        lingering=any(report.lingering for report in reports),
        in_flight=any(report.in_flight for report in reports),
        in_time=all(report.in_time for report in reports),
    )


_ORDERS = DataclassCodec[Order](get_args(Order))
_REPORTS = DataclassCodec[TransferReport]((TransferReport,))
OF_FIRST: LineCodec[Order, Report] = LineCodec(_ORDERS.encode, _REPORTS.decode)
"""Rank 0 sends orders, and gets reports."""
OF_OTHERS = LineCodec(_REPORTS.encode, _ORDERS.decode)
