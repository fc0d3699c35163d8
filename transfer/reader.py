"""Reads the memory of another process over a `Pipeline`, as writes do. Three things differ from writes.

- The destination is here. It is used for nothing else until the read has ended. Afterwards nothing lands, whatever the
  outcome is (`MooncakeChannel`), so reads do not linger.
- The owner holds the source unchanged until it hears that the read has ended.
- Another process may have the address by now, or the owner may have reused the memory. Bytes are used only after
  they were compared with the owner's digests.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transfer.planner import Descriptors
from transfer.writer import Channel, Outcome, Pipeline, TransferError, Write

_WHAT_FAILED = {
    Outcome.FAILED: "the other process cannot be reached or refuses a read",
    Outcome.CUT: "the connection was lost",
    Outcome.GIVEN_UP: "the transport gave a read up",
    Outcome.UNKNOWN: "nobody knows whether a read has ended",
}


@dataclass(frozen=True)
class ReadReport:
    """The end of a read. All of it has landed if `error` is None.

    num_bytes, num_descriptors: posted ones. in_flight: some of it may land for as long as this process lives, so its
    memory must not be used.
    """

    num_bytes: int
    num_descriptors: int
    seconds: float
    error: str | None
    in_flight: bool


class Reader:
    """Reads over one channel (`Transports.connect_to_read`). One thread uses it."""

    def __init__(self, channel: Channel, pipeline: Pipeline | None = None) -> None:
        """pipeline: of that channel, if its owner has one."""
        self._channel = channel
        self._pipeline = pipeline or Pipeline(channel)

    @property
    def lost_track(self) -> bool:
        """Whether something may be in flight for good, so that channel and memory must stay."""
        return self._pipeline.lost_track

    @property
    def pipeline(self) -> Pipeline:
        """What is in flight, for the owner of the buffers that are read into."""
        return self._pipeline

    def post(
        self,
        batches: Iterable[Descriptors],
        may_post: Callable[[], bool],
        on_end: Callable[[ReadReport], None],
        buffer: object = None,
    ) -> None:
        """Post a read. Returns when all of it is posted, or when it is no longer wanted.

        may_post: asked before each post; may wait for a lease. on_end: called once, on this thread, here or in a later
        call. buffer: the lent buffer that is read into, if any; held until the read has ended.
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
        """Wait for everything that was posted, and close the channel unless it `lost_track`."""
        self.drain()
        if not self.lost_track:
            self._channel.close()

    def read(self, batches: Iterable[Descriptors], may_post: Callable[[], bool] = lambda: True) -> ReadReport:
        reports: list[ReadReport] = []
        self.post(batches, may_post, reports.append)
        self.drain()
        [report] = reports
        return report

    def _gone(self) -> str | None:
        try:
            self._channel.check()
        except TransferError as error:
            return str(error)
        return None
