"""Fetches KV from decode nodes, on a thread for each."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from control.messages import Destination, Peer
from prefill_node.fetch import Fetch, FetchReport, RunningFetch
from prefill_node.landing import KVSink
from prefill_node.lease import await_lease
from transfer.reader import Reader
from transfer.transports import NoRoute
from transfer.writer import Channel

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FetchResources:
    """What the threads of a fetcher share.

    connect: the best way to read a decode node's pool; raises NoRoute. silence: for how many seconds a decode node may
    have been dead (`ControlPlane.silence`). new_sink: where to read to. kept: readers and sinks that reads of unknown
    end may use until the process ends.
    """

    connect: Callable[[Destination], Channel]
    silence: Callable[[Peer], float]
    new_sink: Callable[[], KVSink]
    page_size: int
    kept: list[object] = field(default_factory=list)


class PrefixFetcher(Protocol):
    """Fetches from decode nodes, on other threads, and reports each fetch once."""

    def submit(self, fetch: Fetch) -> None: ...

    def keep_only(self, boot_ids: set[str]) -> None:
        """Fetch from no other decode nodes any more, once what was submitted has ended."""
        ...


class Fetcher:
    """One thread per decode node, so that a slow one delays only its own requests. One loop calls it.

    `report` is called once per fetch, on any thread, when nothing of it lands any more, as far as can be known.
    """

    def __init__(self, resources: FetchResources, report: Callable[[FetchReport], None]) -> None:
        self._resources = resources
        self._report = report
        self._lanes: dict[str, _Lane] = {}

    def submit(self, fetch: Fetch) -> None:
        """Queue a fetch behind those from the same decode node."""
        boot_id = fetch.decode.boot_id
        if boot_id not in self._lanes:
            self._lanes[boot_id] = _Lane(self._resources, fetch.decode, self._report)
        self._lanes[boot_id].fetches.put(fetch)

    def keep_only(self, boot_ids: set[str]) -> None:
        """End the threads of other decode nodes once their queues are empty."""
        for boot_id in self._lanes.keys() - boot_ids:
            self._lanes.pop(boot_id).fetches.put(None)


class _Lane:
    """The thread that reads from one decode node. It ends only when it is told to."""

    def __init__(self, resources: FetchResources, decode: Peer, report: Callable[[FetchReport], None]) -> None:
        self._resources = resources
        self._decode = decode
        self._report = report
        self._reader: Reader | None = None
        self._sink: KVSink | None = None
        self.fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"fetch-{decode.address}", daemon=True).start()

    def _work(self) -> None:
        while (fetch := self.fetches.get()) is not None:
            self._report(self._fetch(fetch))
        if self._reader is not None:
            self._reader.close()
        if self._sink is not None:
            self._sink.close()

    def _fetch(self, fetch: Fetch) -> FetchReport:
        if not fetch.go_on():
            return FetchReport(fetch, error="not wanted any more", failure="timeout")
        try:
            reader, sink = self._connected(fetch.destination)
        except NoRoute as error:
            return FetchReport(fetch, error=str(error), failure="read")
        except Exception as error:
            log.exception("connecting failed", decode=self._decode.address, **fetch.attempt.log_fields)
            return FetchReport(fetch, error=f"fetching failed: {error}", failure="read")
        silence = partial(self._resources.silence, self._decode)
        running = RunningFetch(fetch, reader, sink, self._resources.page_size)
        report = running.run(may_post=lambda: await_lease(silence, fetch.go_on))
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
