"""Sends what forward passes compute to decode nodes, while they compute."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from control.messages import Destination, Peer
from prefill_node.outgoing import Chunk, Outgoing, Reading, Sent, gather_policy
from prefill_node.ring import SendRing, SendRings
from transfer.routes import NoRoute
from transfer.writer import Channel, Pipeline

log = structlog.get_logger(__name__)

MAX_SESSIONS = 64
LEASE_S = 2.0
"""Nothing is posted to a decode node after so long without an answered ping: its address may be another process's."""


@dataclass(frozen=True)
class Surroundings:
    """What the threads of a sender share.

    connect: the best way to a decode node; raises NoRoute. silence: for how many seconds a decode node may have been
    dead (`ControlPlane.silence`). kept: memory and channels of writes of which nobody knows whether they have ended;
    they may be used until the process ends.
    """

    reading: Reading
    rings: SendRings
    connect: Callable[[Destination], Channel]
    silence: Callable[[Peer], float]
    kept: list[object] = field(default_factory=list)


class Sender:
    """One thread per decode node, so that a slow one delays only its own requests; MAX_SESSIONS of them at most.

    One thread, the node's loop, calls it.
    """

    def __init__(self, surroundings: Surroundings, report: Callable[[Sent], None]) -> None:
        """report: is called once per chunk, on any thread and whatever fails, when all that was posted of it has ended,
        as far as can be known."""
        self._surroundings = surroundings
        self._report = report
        self._sessions: dict[str, _Session] = {}

    def open(self, decode: Peer) -> bool:
        """Start a thread for a decode node that has none. False if there are as many as there may be."""
        if decode.boot_id not in self._sessions:
            if len(self._sessions) >= MAX_SESSIONS:
                return False
            self._sessions[decode.boot_id] = _Session(self._surroundings, decode, self._report)
        return True

    def submit(self, chunk: Chunk) -> None:
        """Queue a chunk behind the earlier ones of its decode node, for which `open` has succeeded."""
        self._sessions[chunk.decode.boot_id].chunks.put(chunk)

    def keep_only(self, boot_ids: set[str]) -> None:
        """End the threads of other decode nodes once their queues are empty."""
        for boot_id in self._sessions.keys() - boot_ids:
            self._sessions.pop(boot_id).chunks.put(None)

    def stop(self, timeout: float) -> bool:
        """End all threads after the chunks that they hold. Whether they ended in time."""
        threads = [session.thread for session in self._sessions.values()]
        self.keep_only(set())
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class _Session:
    """The thread that sends to one decode node, its way there and its send buffers.

    The thread ends when it is told to and not before: what fails costs the chunks concerned, each of which is reported
    once.
    """

    def __init__(self, surroundings: Surroundings, decode: Peer, report: Callable[[Sent], None]) -> None:
        self._surroundings = surroundings
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

    def _close(self) -> None:
        """See what was posted to its end, and give back what nothing uses any more."""
        pipeline, self._pipeline = self._pipeline, None
        ring, self._ring = self._ring, None
        if pipeline is None:
            return
        used = (pipeline, ring)
        # Until it is known that nothing of it is in flight, whatever fails meanwhile.
        self._surroundings.kept.append(used)
        pipeline.drain()
        if pipeline.lost_track:
            return
        self._surroundings.kept.remove(used)
        if ring is not None:
            self._surroundings.rings.take_back(ring)
        pipeline.channel.close()

    def _report(self, sent: Sent) -> None:
        """The one place where chunks are reported: once each."""
        if self._unreported.pop(id(sent.chunk), None) is not None:
            self._report_to(sent)

    def _give_up(self, error: Exception) -> None:
        """After a bug: of the chunks that were not reported nobody knows what is in flight."""
        log.exception("sending failed", decode=self._decode.address, chunks=len(self._unreported))
        for chunk in list(self._unreported.values()):
            self._report(Sent(chunk, error=f"sending failed: {error}", in_flight=True))

    def _next(self) -> Chunk | None:
        """The next chunk; while there is none, what is in flight is seen to its end."""
        while self._pipeline is not None and not self._pipeline.is_empty:
            try:
                return self.chunks.get_nowait()
            except queue.Empty:
                self._pipeline.settle_oldest()
        return self.chunks.get()

    def _send(self, chunk: Chunk) -> None:
        self._unreported[id(chunk)] = chunk
        if chunk.cancelled():
            self._report(Sent(chunk, error="aborted"))
            return
        try:
            pipeline = self._connected(chunk.destination)
        except NoRoute as error:
            log.warning("no route", request_id=chunk.attempt.request_id, epoch=chunk.attempt.epoch, error=str(error))
            self._report(Sent(chunk, error=str(error)))
            return
        except Exception as error:
            log.exception("connecting failed", request_id=chunk.attempt.request_id, decode=self._decode.address)
            self._report(Sent(chunk, error=f"sending failed: {error}"))
            return
        outgoing = Outgoing(chunk, self._surroundings.reading, pipeline, self._lent_ring, self._report)
        outgoing.post(may_post=lambda: self._may_post(chunk))

    def _connected(self, destination: Destination) -> Pipeline:
        if self._pipeline is not None and self._pipeline.lost_track:
            # Some of its send buffers may be read for ever: later chunks get others, and a channel without a past.
            self._close()
        if self._pipeline is None:
            channel = self._surroundings.connect(destination)
            self._pipeline = Pipeline(channel)
            policy = gather_policy(channel.transport, self._surroundings.reading.source.in_host_memory)
            log.info("route", decode=self._decode.address, transport=channel.transport, gathers=policy.value)
        return self._pipeline

    def _lent_ring(self) -> SendRing:
        if self._ring is None:
            self._ring = self._surroundings.rings.lend()
        return self._ring

    def _may_post(self, chunk: Chunk) -> bool:
        """Whether the chunk is still wanted; waits while the decode node may be dead."""
        while not chunk.cancelled():
            if self._surroundings.silence(self._decode) < LEASE_S:
                return True
            time.sleep(0.02)
        return False
