"""A chunk on its way to a decode node: what is posted, in which order, and from where."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from prefill_node.plan import ChunkPlan, Part
from prefill_node.progress import ForwardProgress
from prefill_node.ring import BUFFER_BYTES, SendRing
from prefill_node.source import KVSource
from transfer.checksum import ChecksumMode, digest, sampled
from transfer.messages import Checksum, Destination, Peer, Transport
from transfer.planner import Descriptors, Int64s
from transfer.writer import Channel, write

_IN_PLACE_BYTES = 8 << 20
"""Of one buffer, in one batch: an abort is heard between batches."""


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a request, to be written to the destination slots of those positions.

    `progress` is the forward pass that computes them. `cancelled` is asked again and again while they are sent.
    """

    request_id: str
    epoch: int
    start: int
    stop: int
    pages: Int64s
    slots: Int64s
    decode: Peer
    destination: Destination
    progress: ForwardProgress
    cancelled: Callable[[], bool]


@dataclass
class Sent:
    """A chunk's writes have all ended: landed, unless `error` says otherwise. `seconds`: without waiting for layers."""

    chunk: Chunk
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    checksums: list[Checksum] = field(default_factory=list)
    error: str | None = None


class Gather(Enum):
    """When items are packed into send buffers before they go out."""

    NEVER = "never"
    WHERE_IT_PAYS = "where source pages are scattered and destination slots are not"
    ALWAYS = "always"


def gather_policy(transport: Transport, source_in_host_memory: bool) -> Gather:
    """A NIC reads any memory in place. A processor copies: out of device memory slowly, so the device packs first;
    over TCP descriptor by descriptor, so fewer are faster; into shared memory piece by piece, which costs nothing.
    """
    if transport == "rdma":
        return Gather.NEVER
    if not source_in_host_memory:
        return Gather.ALWAYS
    return Gather.WHERE_IT_PAYS if transport == "tcp" else Gather.NEVER


@dataclass(frozen=True)
class Reading:
    """How KV is read for sending. layer_of_buffer: the layer after which each of the source's buffers is complete."""

    source: KVSource
    layer_of_buffer: tuple[int, ...]
    page_size: int
    checksums: ChecksumMode

    def buffers_in_order(self) -> list[int]:
        return sorted(range(len(self.layer_of_buffer)), key=lambda buffer: self.layer_of_buffer[buffer])


class Outgoing:
    """One chunk, sent layer by layer as its forward pass finishes them. Fills in the account, `sent`."""

    def __init__(self, chunk: Chunk, reading: Reading, channel: Channel, ring: Callable[[], SendRing]) -> None:
        """`ring` lends this thread's send buffers if they are needed."""
        self.sent = Sent(chunk)
        self._chunk = chunk
        self._reading = reading
        self._channel = channel
        self._plan = ChunkPlan(chunk.pages, reading.page_size, chunk.slots, chunk.start, chunk.stop)
        policy = gather_policy(channel.transport, reading.source.in_host_memory)
        gathers = policy is Gather.ALWAYS or (policy is Gather.WHERE_IT_PAYS and self._plan.gathering_pays)
        self._ring = ring() if gathers else None
        self._part_bytes = BUFFER_BYTES if gathers else _IN_PLACE_BYTES

    def run(self, may_post: Callable[[], bool]) -> None:
        """Raises TransferError or TransferAborted. In any case nothing is in flight afterwards."""
        started = time.monotonic()
        try:
            write(self._channel, self._batches(), may_post)
        finally:
            self.sent.seconds += time.monotonic() - started

    def _batches(self) -> Iterator[Descriptors]:
        chunk, reading = self._chunk, self._reading
        for buffer in reading.buffers_in_order():
            waiting_since = time.monotonic()
            chunk.progress.wait(reading.layer_of_buffer[buffer], chunk.cancelled)
            self.sent.seconds -= time.monotonic() - waiting_since
            item_bytes = reading.source.buffers.item_lengths[buffer]
            for part in self._plan.parts(max(1, self._part_bytes // item_bytes)):
                batch = self._batch(buffer, part, item_bytes)
                self.sent.num_bytes += (part.stop - part.start) * item_bytes
                self.sent.num_descriptors += len(batch.lengths)
                yield batch

    def _batch(self, buffer: int, part: Part, item_bytes: int) -> Descriptors:
        """A part of one buffer, from where it lies or from the next send buffer; its checksum is noted."""
        source, target = self._reading.source, self._chunk.destination.buffers.ptrs[buffer]
        checked = sampled(self._reading.checksums, part.start, part.stop, buffer)
        if self._ring is None:
            if checked is not None:
                self._note(buffer, checked, source.digest(buffer, part, *checked))
            return part.direct.descriptors(source.buffers.ptrs[buffer], target, item_bytes)
        packed = self._ring.take()
        source.gather(buffer, part, packed)
        if checked is not None:
            first = packed.data_ptr() + (checked[0] - part.start) * item_bytes
            self._note(buffer, checked, digest([(first, (checked[1] - checked[0]) * item_bytes)]))
        return part.packed[1].descriptors(packed.data_ptr(), target, item_bytes)

    def _note(self, buffer: int, positions: tuple[int, int], value: int) -> None:
        start, stop = positions
        self.sent.checksums.append(Checksum(buffer=buffer, start=start, stop=stop, digest=value))
