"""Sends KV to decode nodes while forward passes still compute."""

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from control.messages import Destination, Peer
from prefill_node.lanes import Lane, Lanes
from prefill_node.outgoing import Chunk, OutgoingChunk
from prefill_node.ring import SendRing, SendRings
from prefill_node.source import Reading
from transfer.transports import packing_of
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
    """Sends chunks."""

    def __init__(self, resources: SendResources) -> None:
        super().__init__("send", lambda decode: _SendLane(resources, decode))


class _SendLane(Lane[Chunk]):
    """The pipeline to one decode node, and its send buffers."""

    def __init__(self, resources: SendResources, decode: Peer) -> None:
        super().__init__(decode, resources.silence)
        self._resources = resources
        self._pipeline: Pipeline | None = None
        self._ring: SendRing | None = None

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

    def _connect(self, destination: Destination) -> None:
        if self._pipeline is not None and self._pipeline.lost_track:
            # Its send buffers and its channel stay in use for ever: later chunks get new ones.
            self.close()
        if self._pipeline is None:
            channel = self._resources.connect(destination)
            self._pipeline = Pipeline(channel)
            packing = packing_of(channel.transport, self._resources.reading.source.in_host_memory)
            log.info("route", decode=self._decode.address, transport=channel.transport, gathers=packing)

    def _post(self, work: Chunk) -> None:
        assert self._pipeline is not None
        outgoing = OutgoingChunk(work, self._resources.reading, self._pipeline, self._lent_ring, self._report)
        outgoing.post(may_post=lambda: self._may_post(work))

    def _lent_ring(self) -> SendRing:
        if self._ring is None:
            self._ring = self._resources.rings.lend()
        return self._ring
