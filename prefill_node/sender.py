"""Sends KV to decode nodes while forward passes still compute."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from control.messages import Destination, Peer
from prefill_node.lease import await_lease
from prefill_node.outgoing import Chunk, OutgoingChunk, SendReport
from prefill_node.ring import SendRing, SendRings
from prefill_node.source import Reading
from transfer.transports import NoRoute, packing_of
from transfer.writer import Channel, Pipeline

log = structlog.get_logger(__name__)

MAX_LANES = 64


@dataclass(frozen=True)
class SendResources:
    """What the lanes of a sender share.

    connect: the best way to a decode node; raises NoRoute. silence: for how many seconds a decode node may have been
    dead (`ControlPlane.silence`). kept: pipelines and send buffers that writes of unknown end may use until the process
    ends.
    """

    reading: Reading
    rings: SendRings
    connect: Callable[[Destination], Channel]
    silence: Callable[[Peer], float]
    kept: list[object] = field(default_factory=list)


class ChunkSender(Protocol):
    """Sends chunks to decode nodes, on other threads, and reports each once."""

    def open(self, decode: Peer) -> bool:
        """Be ready to send to a decode node. False if there are too many."""
        ...

    def submit(self, chunk: Chunk) -> None:
        """Send a chunk to a decode node that is `open`."""
        ...

    def keep_only(self, boot_ids: set[str]) -> None:
        """Send to no other decode nodes any more, once what was submitted has ended."""
        ...

    def stop(self, timeout: float) -> bool:
        """End once what was submitted has ended. Whether it has in time."""
        ...


class Sender:
    """One lane per decode node, at most MAX_LANES, so that a slow one delays only its own requests. One loop calls it.

    `report` is called once per chunk, on any thread, when all writes of the chunk have ended as far as can be known.
    """

    def __init__(self, resources: SendResources, report: Callable[[SendReport], None]) -> None:
        self._resources = resources
        self._report = report
        self._lanes: dict[str, _Lane] = {}

    def open(self, decode: Peer) -> bool:
        """Start a lane to a decode node that has none. False if there are MAX_LANES already."""
        if decode.boot_id not in self._lanes:
            if len(self._lanes) >= MAX_LANES:
                return False
            self._lanes[decode.boot_id] = _Lane(self._resources, decode, self._report)
        return True

    def submit(self, chunk: Chunk) -> None:
        """Queue a chunk on the lane to its decode node, which `open` has started."""
        self._lanes[chunk.decode.boot_id].chunks.put(chunk)

    def keep_only(self, boot_ids: set[str]) -> None:
        """End the lanes to other decode nodes once their queues are empty."""
        for boot_id in self._lanes.keys() - boot_ids:
            self._lanes.pop(boot_id).chunks.put(None)

    def stop(self, timeout: float) -> bool:
        """End all lanes once their queues are empty. Whether they ended in time."""
        threads = [lane.thread for lane in self._lanes.values()]
        self.keep_only(set())
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class _Lane:
    """The thread that sends to one decode node, with its pipeline and its send buffers.

    The thread ends only when it is told to: whatever fails costs the chunks concerned, each of which is reported once.
    """

    def __init__(self, resources: SendResources, decode: Peer, report: Callable[[SendReport], None]) -> None:
        self._resources = resources
        self._report_to = report
        self._decode = decode
        self._pipeline: Pipeline | None = None
        self._ring: SendRing | None = None
        self._unreported: dict[int, Chunk] = {}
        """Chunks that were taken from the queue and not reported yet, by their identity."""
        self.chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"send-{decode.address}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            try:
                if (chunk := self._next()) is None:
                    break
                self._send(chunk)
            except Exception as error:
                self._give_up(error)
        try:
            self._close()
        except Exception as error:
            self._give_up(error)

    def _next(self) -> Chunk | None:
        """The next chunk. While there is none, wait for the writes in flight to end."""
        while self._pipeline is not None and not self._pipeline.is_empty:
            try:
                return self.chunks.get_nowait()
            except queue.Empty:
                self._pipeline.settle_oldest()
        return self.chunks.get()

    def _send(self, chunk: Chunk) -> None:
        self._unreported[id(chunk)] = chunk
        if chunk.cancelled():
            self._report(SendReport(chunk, error="aborted"))
            return
        try:
            pipeline = self._connected(chunk.destination)
        except NoRoute as error:
            log.warning("no route", error=str(error), **chunk.attempt.log_fields)
            self._report(SendReport(chunk, error=str(error)))
        except Exception as error:
            log.exception("connecting failed", decode=self._decode.address, **chunk.attempt.log_fields)
            self._report(SendReport(chunk, error=f"sending failed: {error}"))
        else:
            outgoing = OutgoingChunk(chunk, self._resources.reading, pipeline, self._lent_ring, self._report)
            silence = partial(self._resources.silence, self._decode)
            outgoing.post(may_post=lambda: await_lease(silence, lambda: not chunk.cancelled()))

    def _connected(self, destination: Destination) -> Pipeline:
        if self._pipeline is not None and self._pipeline.lost_track:
            # Its send buffers and its channel stay in use for ever: later chunks get new ones.
            self._close()
        if self._pipeline is None:
            channel = self._resources.connect(destination)
            self._pipeline = Pipeline(channel)
            packing = packing_of(channel.transport, self._resources.reading.source.in_host_memory)
            log.info("route", decode=self._decode.address, transport=channel.transport, gathers=packing)
        return self._pipeline

    def _lent_ring(self) -> SendRing:
        if self._ring is None:
            self._ring = self._resources.rings.lend()
        return self._ring

    def _close(self) -> None:
        """Wait for all writes to end, and give back what they used."""
        pipeline, self._pipeline = self._pipeline, None
        ring, self._ring = self._ring, None
        if pipeline is None:
            return
        used = (pipeline, ring)
        # Kept alive, whatever fails meanwhile, until it is known that no write uses it.
        self._resources.kept.append(used)
        pipeline.drain()
        if pipeline.lost_track:
            return
        self._resources.kept.remove(used)
        if ring is not None:
            self._resources.rings.take_back(ring)
        pipeline.channel.close()

    def _report(self, report: SendReport) -> None:
        """The one place that reports chunks: each once."""
        if self._unreported.pop(id(report.chunk), None) is not None:
            self._report_to(report)

    def _give_up(self, error: Exception) -> None:
        """After a bug: nobody knows which writes of the unreported chunks are in flight."""
        log.exception("sending failed", decode=self._decode.address, chunks=len(self._unreported))
        for chunk in list(self._unreported.values()):
            self._report(SendReport(chunk, error=f"sending failed: {error}", in_flight=True))
