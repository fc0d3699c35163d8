"""Sends KV to decode nodes while forward passes still compute."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from control.messages import Destination, Peer
from prefill_node.lanes import Lanes
from prefill_node.lease import await_lease
from prefill_node.orders import TransferReport
from prefill_node.outgoing import Chunk, OutgoingChunk
from prefill_node.plan import gather_policy
from prefill_node.ring import SendRing, SendRings
from prefill_node.source import Reading
from transfer.routes import NoRoute
from transfer.writer import Channel, Pipeline

log = structlog.get_logger(__name__)


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


class Sender(Lanes[Chunk]):
    """Sends chunks. `report` is called once per chunk, on any thread, when all writes of the chunk have ended as far as
    can be known."""

    def __init__(self, resources: SendResources, report: Callable[[TransferReport], None]) -> None:
        super().__init__("send", lambda decode: _SendLane(resources, decode, report))


class _SendLane:
    """The pipeline to one decode node, and its send buffers."""

    def __init__(self, resources: SendResources, decode: Peer, report: Callable[[TransferReport], None]) -> None:
        self._resources = resources
        self._report_to = report
        self._decode = decode
        self._pipeline: Pipeline | None = None
        self._ring: SendRing | None = None
        self._unreported: set[int] = set()
        """Numbers of chunks that were taken and not reported yet."""

    def serve(self, chunk: Chunk) -> None:
        work, attempt = chunk.write.work, chunk.write.attempt
        self._unreported.add(work)
        if chunk.cancelled():
            self._report(TransferReport(work, error="aborted"))
            return
        try:
            pipeline = self._connected(chunk.write.destination)
        except NoRoute as error:
            log.warning("no route", error=str(error), **attempt.log_fields)
            self._report(TransferReport(work, error=str(error)))
        except Exception as error:
            log.exception("connecting failed", decode=self._decode.address, **attempt.log_fields)
            self._report(TransferReport(work, error=f"sending failed: {error}"))
        else:
            outgoing = OutgoingChunk(chunk, self._resources.reading, pipeline, self._lent_ring, self._report)
            silence = partial(self._resources.silence, self._decode)
            outgoing.post(may_post=lambda: await_lease(silence, lambda: not chunk.cancelled()))

    def settle(self) -> bool:
        if self._pipeline is None or self._pipeline.is_empty:
            return False
        self._pipeline.settle_oldest()
        return True

    def close(self) -> None:
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

    def give_up(self, error: Exception) -> None:
        log.exception("sending failed", decode=self._decode.address, chunks=len(self._unreported))
        for work in list(self._unreported):
            self._report(TransferReport(work, error=f"sending failed: {error}", in_flight=True))

    def _connected(self, destination: Destination) -> Pipeline:
        if self._pipeline is not None and self._pipeline.lost_track:
            # Its send buffers and its channel stay in use for ever: later chunks get new ones.
            self.close()
        if self._pipeline is None:
            channel = self._resources.connect(destination)
            self._pipeline = Pipeline(channel)
            policy = gather_policy(channel.transport, self._resources.reading.source.in_host_memory)
            log.info("route", decode=self._decode.address, transport=channel.transport, gathers=policy)
        return self._pipeline

    def _lent_ring(self) -> SendRing:
        if self._ring is None:
            self._ring = self._resources.rings.lend()
        return self._ring

    def _report(self, report: TransferReport) -> None:
        """The one place that reports chunks: each once."""
        if report.work in self._unreported:
            self._unreported.remove(report.work)
            self._report_to(report)
