"""Reads prefixes from decode nodes, and compares what came with its digests.

Reads differ from writes in three things:

- The destination is here. It is used for nothing else until the read has ended. Afterwards nothing lands, whatever the
  outcome is (`MooncakeChannel`), so reads do not linger.
- The decode node holds the source unchanged until it hears that the read has ended.
- Another process may have the address by now, or the decode node may have reused the memory. Bytes are used only after
  they were compared with the decode node's digests.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from base.metrics import FetchFailure
from control.messages import Destination, Peer
from kvcache.layout import buffers_by_layer
from prefill_node.arrival import PrefixArrival
from prefill_node.lanes import Lane, Lanes, LaneWork
from prefill_node.orders import BlockToRead, TransferReport
from prefill_node.pool_io import KVSink, StagedRead
from transfer.checksum import digest
from transfer.memory import Checksum, Checksums
from transfer.planner import expand_pages
from transfer.writer import Channel, Outcome, Pipeline, Write

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Fetch(LaneWork):
    """A block of a prefix that is read. arrival: hears which layers are here, but not of the end."""

    block: BlockToRead
    arrival: PrefixArrival

    def cancel(self) -> None:
        super().cancel()
        self.arrival.give_up()


class WrongGrant(Exception):
    """The digests do not cover what was granted, each position of each buffer once."""


@dataclass(frozen=True)
class FetchPiece:
    """Consecutive positions of one buffer that are read together: those of `checksums`, in their order."""

    buffer: int
    checksums: list[Checksum]

    @property
    def start(self) -> int:
        return self.checksums[0].start

    @property
    def stop(self) -> int:
        return self.checksums[-1].stop


def pieces(
    checksums: Checksums, start: int, stop: int, item_lengths: tuple[int, ...], most: int, order: Sequence[int]
) -> Iterator[FetchPiece]:
    """What is read together, buffer after buffer in `order`: groups that have a digest, at most `most` bytes.

    Raises WrongGrant if the groups do not tile [start, stop) of each buffer, or one of them is larger than that.
    """
    of_buffer: list[list[Checksum]] = [[] for _ in item_lengths]
    for checksum in checksums.rows():
        if checksum.buffer >= len(of_buffer):
            raise WrongGrant(f"a digest of buffer {checksum.buffer} of {len(of_buffer)}")
        of_buffer[checksum.buffer].append(checksum)
    for buffer in order:
        groups, item_bytes = of_buffer[buffer], item_lengths[buffer]
        groups.sort(key=lambda group: group.start)
        at, taken = start, list[Checksum]()
        for group in groups:
            if group.start != at or group.stop <= at:
                raise WrongGrant(f"buffer {buffer}: a digest of [{group.start}, {group.stop}), expected one from {at}")
            if (group.stop - group.start) * item_bytes > most:
                raise WrongGrant(f"a digest of {(group.stop - group.start) * item_bytes} bytes, more than {most}")
            if taken and (group.stop - taken[0].start) * item_bytes > most:
                yield FetchPiece(buffer, taken)
                taken = []
            taken.append(group)
            at = group.stop
        if at != stop:
            raise WrongGrant(f"buffer {buffer}: digests up to {at}, expected {stop}")
        yield FetchPiece(buffer, taken)


class RunningFetch:
    """Reads a fetch layer by layer, and compares each piece with its digests while the next are read. One thread uses
    it."""

    def __init__(self, fetch: Fetch, pipeline: Pipeline, sink: KVSink, page_size: int) -> None:
        self._read = fetch.block
        self._arrival = fetch.arrival
        self._pipeline = pipeline
        self._sink = sink
        self._page_size = page_size
        self._report = TransferReport(fetch.block.work)
        self._missing: Counter[int] = Counter()
        """By layer, pieces that are not verified yet."""
        self._layers = 0
        """Layers that are here."""

    def run(self, may_post: Callable[[], bool]) -> TransferReport:
        """Return when nothing of it lands any more. Never raises: errors are reported.

        may_post: asked before each read; it may wait.
        """
        self._report.posted_at = time.monotonic()
        try:
            found = self._pieces()
            self._missing.update(self._layer_of(piece) for piece in found)
            self._arrival.begin()
            for piece in found:
                if self._report.error is not None:
                    break
                self._post(piece, may_post)
        except WrongGrant as error:
            self._fail(str(error), "checksum")
        except Exception as error:
            # A bug costs the fetch: its prompt is computed.
            log.exception("fetching failed", **self._read.attempt.log_fields)
            self._fail(f"fetching failed: {error}", "read")
        try:
            self._pipeline.drain()
        except Exception as error:
            log.exception("nobody knows whether a read has ended", **self._read.attempt.log_fields)
            self._fail(f"fetching failed: {error}", "read")
            self._report.in_flight = True
        self._report.ended_at = time.monotonic()
        return self._report

    def _pieces(self) -> list[FetchPiece]:
        """All of them, so that nothing is read for a grant that is wrong."""
        read, lengths = self._read, self._sink.buffers.item_lengths
        if read.destination.buffers.item_lengths != lengths:
            raise WrongGrant(f"items of {read.destination.buffers.item_lengths} bytes there, {lengths} here")
        order = buffers_by_layer(self._arrival.layer_of_buffer)
        return list(pieces(read.checksums, read.start, read.stop, lengths, self._sink.most_bytes, order))

    def _layer_of(self, piece: FetchPiece) -> int:
        return self._arrival.layer_of_buffer[piece.buffer]

    def _post(self, piece: FetchPiece, may_post: Callable[[], bool]) -> None:
        read = self._read
        rows = expand_pages(read.pages, self._page_size, piece.start, piece.stop)
        slots = read.slots[piece.start - read.start : piece.stop - read.start]
        source = read.destination.buffers.ptrs[piece.buffer]
        staged = self._sink.stage(piece.buffer, rows, slots, source, self._pipeline)
        reads = staged.reads.cut(self._pipeline.channel.max_bytes)
        write = Write(
            on_end=lambda: self._landed(piece, staged, write),
            go_on=lambda: self._report.error is None and may_post(),
            kind="read",
        )
        try:
            self._pipeline.post(write, reads, staged.buffer)
        except Exception:
            write.is_aborted = True
            raise
        finally:
            self._pipeline.close(write)

    def _landed(self, piece: FetchPiece, staged: StagedRead, write: Write) -> None:
        self._report.num_bytes += write.num_bytes
        self._report.in_flight |= write.outcome is Outcome.UNKNOWN
        try:
            if (error := self._pipeline.failure_reason(write)) is not None:
                self._fail(error, "read")
            elif self._report.error is None:
                self._verify(piece, staged)
        except Exception as error:
            log.exception("fetching failed", **self._read.attempt.log_fields)
            self._fail(f"fetching failed: {error}", "read")

    def _verify(self, piece: FetchPiece, staged: StagedRead) -> None:
        for checksum in piece.checksums:
            found = digest(staged.ranges(checksum.start - piece.start, checksum.stop - piece.start))
            if found != checksum.digest:
                what = f"buffer {piece.buffer}, positions [{checksum.start}, {checksum.stop})"
                self._fail(f"{what}: {found:#018x}, not {checksum.digest:#018x}", "checksum")
                return
        staged.commit()
        self._missing[self._layer_of(piece)] -= 1
        before = self._layers
        while self._layers < self._arrival.num_layers and not self._missing[self._layers]:
            self._layers += 1
        if self._layers > before:
            self._arrival.set_layers_ready(self._layers)

    def _fail(self, error: str, failure: FetchFailure) -> None:
        if self._report.error is None:
            self._report.error, self._report.failure = error, failure
            self._arrival.give_up()


class Fetcher(Lanes[Fetch, KVSink]):
    always_lends = True

    def __init__(
        self,
        connect: Callable[[Destination], Channel],
        silence: Callable[[Peer], float],
        new_sink: Callable[[], KVSink],
        page_size: int,
        steps_ended: Callable[[], int],
    ) -> None:
        """connect, silence: as of Lanes. new_sink: where to read to. steps_ended: in this rank, for
        `BlockToRead.after`."""
        super().__init__("fetch", connect, silence, new_sink, lambda sink: sink.close())
        self._page_size = page_size
        self._steps_ended = steps_ended

    def connected(self, decode: Peer, channel: Channel) -> None:
        log.info("reads", decode=decode.address, transport=channel.transport)

    def post(self, lane: Lane[Fetch, KVSink], pipeline: Pipeline, work: Fetch) -> None:
        """Returns when nothing of it lands any more."""
        running = RunningFetch(work, pipeline, lane.lent(), self._page_size)
        report = running.run(lambda: lane.may_post(work, lambda: self._steps_ended() >= work.block.after))
        if report.in_flight or pipeline.lost_track:
            lane.keep()
        lane.report(report)
