"""Reads prefixes from decode nodes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from control.messages import Destination, Peer
from prefill_node.fetch import Fetch, RunningFetch
from prefill_node.landing import KVSink
from prefill_node.lanes import Lane, Lanes
from transfer.reader import Reader
from transfer.writer import Channel

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FetchResources:
    """What the lanes of a fetcher share.

    connect: the best way to read a decode node's pool; raises NoRoute. silence: for how many seconds a decode node may
    have been dead (`ControlPlane.silence`). new_sink: where to read to. kept: readers and sinks that reads of unknown
    end may use until the process ends.
    """

    connect: Callable[[Destination], Channel]
    silence: Callable[[Peer], float]
    new_sink: Callable[[], KVSink]
    page_size: int
    kept: list[object] = field(default_factory=list)


class Fetcher(Lanes[Fetch]):
    """Reads blocks of prefixes."""

    def __init__(self, resources: FetchResources, steps_ended: Callable[[], int]) -> None:
        """steps_ended: in this rank, for `BlockToRead.after`."""
        super().__init__("fetch", lambda decode: _FetchLane(resources, decode, steps_ended))


class _FetchLane(Lane[Fetch]):
    """The reader of one decode node's pool, and where it reads to."""

    def __init__(self, resources: FetchResources, decode: Peer, steps_ended: Callable[[], int]) -> None:
        super().__init__(decode, resources.silence)
        self._resources = resources
        self._steps_ended = steps_ended
        self._reader: Reader | None = None
        self._sink: KVSink | None = None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._sink is not None:
            self._sink.close()

    def _connect(self, destination: Destination) -> None:
        if self._reader is None:
            channel = self._resources.connect(destination)
            self._reader = Reader(channel)
            log.info("reads", decode=self._decode.address, transport=channel.transport)
        if self._sink is None:
            self._sink = self._resources.new_sink()

    def _post(self, work: Fetch) -> None:
        """Returns when nothing of it lands any more."""
        reader, sink = self._reader, self._sink
        assert reader is not None
        assert sink is not None
        running = RunningFetch(work, reader, sink, self._resources.page_size)
        report = running.run(lambda: self._may_post(work, lambda: self._steps_ended() >= work.block.after))
        if report.in_flight or reader.lost_track:
            # What they use stays as it is: the next fetch gets new ones.
            self._resources.kept.append((reader, sink))
            self._reader = self._sink = None
        self._report(report)
