"""One fetch: KV of a prompt's positions, read from the decode node that has it, and compared with its digests."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from control.messages import AttemptId, Destination, Peer
from prefill_node.arrival import PrefixArrival
from prefill_node.landing import KVSink, Landing
from transfer.checksum import digest
from transfer.memory import Checksum, Checksums
from transfer.planner import Int64s, expand_pages
from transfer.reader import Reader, ReadReport

log = structlog.get_logger(__name__)

FetchFailure = Literal["refused", "read", "checksum", "timeout"]
"""Why a fetch fails: the decode node does not lend, a read failed, the bytes are not those that the decode node has
hashed, or it took too long."""


@dataclass(frozen=True, eq=False)
class Fetch:
    """Positions [start, stop) of an attempt, to be read from a decode node's `slots`, int64 [stop - start].

    pages: of the whole request. checksums: of all these positions in all buffers. go_on: asked again and again; False
    once it is not wanted any more. arrival: hears which layers are here, but not of the end.
    """

    attempt: AttemptId
    decode: Peer
    destination: Destination
    start: int
    stop: int
    pages: Int64s
    slots: Int64s
    checksums: Checksums
    go_on: Callable[[], bool]
    arrival: PrefixArrival


@dataclass(frozen=True)
class FetchReport:
    """A fetch has ended, and lands nothing any more. All of it is in the pages, and verified, without `error`.

    seconds: of reading and verifying. in_flight: of some reads nobody knows whether they have ended, so the pages must
    be left alone for as long as this process runs. waited: seconds in which all was read, and ranks could not exchange
    it since a step was under way. Computing would have waited, too.
    """

    fetch: Fetch
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    failure: FetchFailure | None = None
    in_flight: bool = False
    waited: float = 0.0


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
    """Buffer after buffer, in this order, what is read together: groups that have a digest, at most so many bytes.

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

    def __init__(self, fetch: Fetch, reader: Reader, sink: KVSink, page_size: int) -> None:
        self._fetch = fetch
        self._reader = reader
        self._sink = sink
        self._page_size = page_size
        self._num_bytes = 0
        self._missing: Counter[int] = Counter()
        """By layer, pieces that are not verified yet."""
        self._layers = 0
        """Layers that are here."""
        self._error: str | None = None
        self._failure: FetchFailure | None = None
        self._in_flight = False

    def run(self, may_post: Callable[[], bool]) -> FetchReport:
        """Return when nothing of it lands any more. Never raises: errors are reported.

        may_post: asked before each read; it may wait.
        """
        started = time.monotonic()
        try:
            found = self._pieces()
            self._missing.update(self._layer_of(piece) for piece in found)
            self._fetch.arrival.begin()
            for piece in found:
                if self._error is not None:
                    break
                self._post(piece, may_post)
        except WrongGrant as error:
            self._fail(str(error), "checksum")
        except Exception as error:
            # A bug costs the fetch: its prompt is computed.
            log.exception("fetching failed", **self._fetch.attempt.log_fields)
            self._fail(f"fetching failed: {error}", "read")
        try:
            self._reader.drain()
        except Exception as error:
            log.exception("nobody knows whether a read has ended", **self._fetch.attempt.log_fields)
            self._fail(f"fetching failed: {error}", "read")
            self._in_flight = True
        seconds = time.monotonic() - started
        return FetchReport(self._fetch, self._num_bytes, seconds, self._error, self._failure, self._in_flight)

    def _pieces(self) -> list[FetchPiece]:
        """All of them, so that nothing is read for a grant that is wrong."""
        lengths = self._sink.buffers.item_lengths
        if self._fetch.destination.buffers.item_lengths != lengths:
            raise WrongGrant(f"items of {self._fetch.destination.buffers.item_lengths} bytes there, {lengths} here")
        fetch = self._fetch
        order = fetch.arrival.buffers_in_order
        return list(pieces(fetch.checksums, fetch.start, fetch.stop, lengths, self._sink.most_bytes, order))

    def _layer_of(self, piece: FetchPiece) -> int:
        return self._fetch.arrival.layer_of_buffer[piece.buffer]

    def _post(self, piece: FetchPiece, may_post: Callable[[], bool]) -> None:
        fetch = self._fetch
        rows = expand_pages(fetch.pages, self._page_size, piece.start, piece.stop)
        slots = fetch.slots[piece.start - fetch.start : piece.stop - fetch.start]
        source = fetch.destination.buffers.ptrs[piece.buffer]
        landing = self._sink.land(piece.buffer, rows, slots, source, self._reader.pipeline)
        self._reader.post(
            [landing.reads],
            may_post=lambda: self._error is None and may_post(),
            on_end=lambda report: self._landed(piece, landing, report),
            buffer=landing.buffer,
        )

    def _landed(self, piece: FetchPiece, landing: Landing, report: ReadReport) -> None:
        self._num_bytes += report.num_bytes
        self._in_flight |= report.in_flight
        if report.error is not None:
            self._fail(report.error, "read")
        elif self._error is None:
            try:
                self._verify(piece, landing)
            except Exception as error:
                log.exception("fetching failed", **self._fetch.attempt.log_fields)
                self._fail(f"fetching failed: {error}", "read")

    def _verify(self, piece: FetchPiece, landing: Landing) -> None:
        for checksum in piece.checksums:
            found = digest(landing.ranges(checksum.start - piece.start, checksum.stop - piece.start))
            if found != checksum.digest:
                what = f"buffer {piece.buffer}, positions [{checksum.start}, {checksum.stop})"
                self._fail(f"{what}: {found:#018x}, not {checksum.digest:#018x}", "checksum")
                return
        landing.keep()
        self._missing[self._layer_of(piece)] -= 1
        arrived = self._layers
        while self._layers < self._fetch.arrival.num_layers and not self._missing[self._layers]:
            self._layers += 1
        if self._layers > arrived:
            self._fetch.arrival.layers_came(self._layers)

    def _fail(self, error: str, failure: FetchFailure) -> None:
        if self._error is None:
            self._error, self._failure = error, failure
            self._fetch.arrival.give_up()
