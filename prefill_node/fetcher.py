"""Reads prefixes from decode nodes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from control.messages import Destination, Peer
from prefill_node.fetch import Fetch, RunningFetch
from prefill_node.landing import KVSink
from prefill_node.lanes import Lanes
from prefill_node.lease import await_lease
from prefill_node.orders import TransferReport
from transfer.reader import Reader
from transfer.routes import NoRoute
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
    """Reads blocks of prefixes. `report` is called once per fetch, on any thread, when nothing of it lands any more, as
    far as can be known, and before a pass that waits for it goes on."""

    def __init__(
        self, resources: FetchResources, report: Callable[[TransferReport], None], steps_ended: Callable[[], int]
    ) -> None:
        """steps_ended: in this rank, for `Read.after`."""
        super().__init__("fetch", lambda decode: _FetchLane(resources, decode, report, steps_ended))


class _FetchLane:
    """The reader of one decode node's pool, and where it reads to."""

    def __init__(
        self,
        resources: FetchResources,
        decode: Peer,
        report: Callable[[TransferReport], None],
        steps_ended: Callable[[], int],
    ) -> None:
        self._resources = resources
        self._decode = decode
        self._report = report
        self._steps_ended = steps_ended
        self._reader: Reader | None = None
        self._sink: KVSink | None = None

    def serve(self, fetch: Fetch) -> None:
        report = self._fetched(fetch)
        if report.error is not None:
            fetch.arrival.give_up()
        fetch.arrival.end(lambda in_time: self._report(replace(report, in_time=in_time)))

    def settle(self) -> bool:
        return False

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._sink is not None:
            self._sink.close()

    def give_up(self, error: Exception) -> None:
        """Reads never raise."""
        log.exception("a thread that fetches cannot be ended", decode=self._decode.address)

    def _fetched(self, fetch: Fetch) -> TransferReport:
        read = fetch.read
        if not fetch.is_wanted():
            return TransferReport(read.work, error="not wanted any more", failure="timeout")
        try:
            reader, sink = self._connected(read.destination)
        except NoRoute as error:
            return TransferReport(read.work, error=str(error), failure="read")
        except Exception as error:
            log.exception("connecting failed", decode=self._decode.address, **read.attempt.log_fields)
            return TransferReport(read.work, error=f"fetching failed: {error}", failure="read")
        silence = partial(self._resources.silence, self._decode)
        running = RunningFetch(fetch, reader, sink, self._resources.page_size)
        report = running.run(lambda: await_lease(silence, fetch.is_wanted, lambda: self._steps_ended() >= read.after))
        if report.in_flight or reader.lost_track:
            # What they use stays as it is: the next fetch gets new ones.
            self._resources.kept.append((reader, sink))
            self._reader = self._sink = None
        return report

    def _connected(self, destination: Destination) -> tuple[Reader, KVSink]:
        if self._reader is None:
            channel = self._resources.connect(destination)
            self._reader = Reader(channel)
            log.info("reads", decode=self._decode.address, transport=channel.transport)
        if self._sink is None:
            self._sink = self._resources.new_sink()
        return self._reader, self._sink
