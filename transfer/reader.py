"""Reads the memory of another process into this one's, and knows when nothing lands any more.

A `Pipeline` does it, like writing: a bounded number of batches in flight, each descriptor polled to its end, what was
cut posted again, and a question before each post whether it may be posted, which is where a reader waits for its lease.
Three things differ:

- What lands, lands here. Memory that is read into is written until the read has ended, so it is used for nothing else
  before; after that nothing is written, whatever became of the read (`MooncakeReads`). So a read lingers nowhere.
- What is read is not to change meanwhile: its owner holds it until it hears that the read has ended.
- Bytes prove nothing. Another process may have the address by now, or the owner may have given the memory to somebody
  else. The owner's digests tell; nobody uses bytes that were not compared with them.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from transfer.memory import BufferInfo
from transfer.planner import Descriptors, Int64s, plan_runs
from transfer.writer import Channel, Outcome, Pipeline, TransferError, Write

_WHAT_FAILED = {
    Outcome.FAILED: "the other process cannot be reached or refuses a read",
    Outcome.CUT: "the connection was lost",
    Outcome.GIVEN_UP: "the transport gave a read up",
    Outcome.UNKNOWN: "nobody knows whether a read has ended",
}


@dataclass(frozen=True)
class ReadReport:
    """A read has ended. All of it has landed if there is no `error`.

    num_bytes, num_descriptors: that were posted. seconds: from its beginning to its end. in_flight: it is not known of
    something whether it has ended; it may land for as long as this process lives, so its memory must be left alone.
    """

    num_bytes: int
    num_descriptors: int
    seconds: float
    error: str | None
    in_flight: bool


class Reader:
    """Reads over one channel that reads (`Transports.connect_to_read`). One thread uses it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pipeline = Pipeline(channel)

    @property
    def lost_track(self) -> bool:
        """Whether something may be in flight for good: the channel must stay open, and its memory as it is."""
        return self._pipeline.lost_track

    @property
    def pipeline(self) -> Pipeline:
        """What is in flight, for whoever lends the buffers that are read into."""
        return self._pipeline

    def post(
        self,
        batches: Iterable[Descriptors],
        may_post: Callable[[], bool],
        on_end: Callable[[ReadReport], None],
        buffer: object = None,
    ) -> None:
        """Post a read, and return when all of it is posted or it is no longer wanted.

        batches: sources are addresses in the other process, destinations addresses here. may_post: asked before each
        post; it may wait. on_end: called once, on this thread, here or in a later call, when the read has ended.
        buffer: what it reads into, if that was lent; held until the read has ended.
        """
        started, posted = time.monotonic(), [0, 0]
        is_whole = False

        def ended() -> None:
            error = _WHAT_FAILED.get(write.outcome) or (None if is_whole else "aborted") or self._gone()
            in_flight = write.outcome is Outcome.UNKNOWN
            on_end(ReadReport(posted[0], posted[1], time.monotonic() - started, error, in_flight))

        write = Write(on_end=ended, go_on=may_post)
        try:
            for batch in batches:
                pieces = batch.cut(self._channel.max_bytes)
                posted[0] += int(pieces.lengths.sum())
                posted[1] += len(pieces.lengths)
                if not self._pipeline.post(write, pieces, buffer):
                    break
            else:
                is_whole = True
        finally:
            self._pipeline.close(write)

    def drain(self) -> None:
        """Wait for everything that was posted to end."""
        self._pipeline.drain()

    def close(self) -> None:
        """Wait for everything that was posted, and give the channel back, unless something may use it for good."""
        self.drain()
        if not self.lost_track:
            self._channel.close()

    def read(self, batches: Iterable[Descriptors], may_post: Callable[[], bool] = lambda: True) -> ReadReport:
        """Post a read, and wait for its end."""
        reports: list[ReadReport] = []
        self.post(batches, may_post, reports.append)
        self.drain()
        [report] = reports
        return report

    def _gone(self) -> str | None:
        """What tells that the other process has ended."""
        try:
            self._channel.check()
        except TransferError as error:
            return str(error)
        return None


def batches_of(slots: Int64s, rows: Int64s, there: BufferInfo, here: BufferInfo) -> Iterator[Descriptors]:
    """What reads item `slots[i]` of each buffer there into item `rows[i]` of the same buffer here, buffer by buffer.

    slots, rows: int64 [n]. Raises ValueError if the buffers do not have items of the same sizes.
    """
    if there.item_lengths != here.item_lengths:
        raise ValueError(f"items of {there.item_lengths} bytes there and of {here.item_lengths} here")
    runs = plan_runs(slots, rows)
    for item_bytes, source, destination in zip(there.item_lengths, there.ptrs, here.ptrs, strict=True):
        yield runs.descriptors(item_bytes).at(source, destination)
