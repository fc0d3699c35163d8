"""Sends KV to decode nodes while forward passes still compute."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from control.messages import Destination, Peer
from kvcache.layout import buffers_by_layer
from prefill_node.compute import ForwardProgress, NotComputed
from prefill_node.lanes import Lane, Lanes, LaneWork
from prefill_node.orders import BlockToSend, TransferReport
from prefill_node.plan import ChunkPart, ChunkPlan
from prefill_node.pool_io import BUFFER_BYTES, Reading, SendBuffer, SendRing, SendRings
from transfer.checksum import digest, sampled
from transfer.memory import Checksum
from transfer.planner import Descriptors
from transfer.transports import packing_of
from transfer.writer import Channel, Outcome, Pipeline, Write

log = structlog.get_logger(__name__)

_IN_PLACE_BYTES = 32 << 20
"""Of one batch at most: aborts take effect between batches."""


@dataclass(eq=False)
class Chunk(LaneWork):
    """A block of a chunk that is sent. progress: of the forward pass that computes it."""

    block: BlockToSend
    progress: ForwardProgress


@dataclass(eq=False)
class OutgoingChunk:
    """Posts a chunk layer by layer as its forward pass finishes the layers.

    lend_ring: lends the lane's send buffers if they are needed. report: called once, when all writes have ended.
    """

    chunk: Chunk
    reading: Reading
    pipeline: Pipeline
    lend_ring: Callable[[], SendRing]
    report: Callable[[TransferReport], None]

    def __post_init__(self) -> None:
        self._result = TransferReport(self.chunk.block.work)

    def post(self, may_post: Callable[[], bool]) -> None:
        """Post all writes, until the chunk is no longer wanted. Never raises: errors are reported.

        may_post: asked before each write; it may wait.
        """
        write = Write(on_end=lambda: self._end(write), go_on=lambda: self._go_on(may_post))
        try:
            for batch, buffer in self._batches():
                if not self.pipeline.post(write, batch, buffer):
                    break
        except NotComputed:
            write.is_aborted = True
        except Exception as error:
            # A bug costs the request, not the lane: the node waits for a report of every chunk.
            log.exception("sending failed", **self.chunk.block.attempt.log_fields)
            self._result.error = f"sending failed: {error}"
        self.pipeline.close(write)

    def _go_on(self, may_post: Callable[[], bool]) -> bool:
        with self._waiting():
            goes_on = may_post()
        if goes_on and self._result.posted_at is None:
            self._result.posted_at = time.monotonic()
        return goes_on

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time as waiting, unless nothing was posted yet."""
        since = time.monotonic()
        yield
        if self._result.posted_at is not None:
            self._result.waited += time.monotonic() - since

    def _end(self, write: Write) -> None:
        """All writes have ended, as far as will ever be known."""
        result = self._result
        result.ended_at = time.monotonic()
        result.num_bytes, result.num_descriptors = write.num_bytes, write.num_descriptors
        result.lingering = write.lingers
        result.in_flight = write.outcome is Outcome.UNKNOWN
        try:
            result.error = self.pipeline.failure_reason(write) or result.error
        except Exception as error:
            log.exception("nobody knows whether the decode node lives", **self.chunk.block.attempt.log_fields)
            result.error = f"sending failed: {error}"
        if result.error is not None and result.error != "aborted":
            decode, fields = self.chunk.block.decode.address, self.chunk.block.attempt.log_fields
            log.warning("transfer failed", decode=decode, error=result.error, **fields)
        self.report(result)

    def _batches(self) -> Iterator[tuple[Descriptors, SendBuffer | None]]:
        """What to post, and the send buffer that it is read from, if any."""
        block, reading = self.chunk.block, self.reading
        channel = self.pipeline.channel
        plan = ChunkPlan(block.pages, reading.page_size, block.slots, block.start, block.stop, channel.max_bytes)
        if plan.should_pack(packing_of(channel.transport, reading.source.in_host_memory)):
            yield from self._packed(plan, self.lend_ring())
        else:
            for batch in self._in_place(plan):
                yield batch, None

    def _packed(self, plan: ChunkPlan, ring: SendRing) -> Iterator[tuple[Descriptors, SendBuffer]]:
        """Each part by way of a send buffer."""
        source, targets = self.reading.source, self.chunk.block.destination.buffers.ptrs
        for buffer in buffers_by_layer(self.reading.layer_of_buffer):
            self._await_layer(buffer)
            item_bytes = source.buffers.item_lengths[buffer]
            for part in plan.parts(max(1, BUFFER_BYTES // item_bytes)):
                into = ring.take(self.pipeline)
                source.gather(buffer, part, into)
                if positions := self._sampled(buffer, part):
                    start, stop = positions
                    sent = into.address + (start - part.start) * item_bytes, (stop - start) * item_bytes
                    self._result.checksums.append(Checksum(buffer, start, stop, digest([sent])))
                _, out = part.packed(item_bytes)
                yield out.at(into.address, targets[buffer]), into

    def _in_place(self, plan: ChunkPlan) -> Iterator[Descriptors]:
        """Straight from the pool, as many buffers at a time as are complete."""
        source, targets = self.reading.source, self.chunk.block.destination.buffers.ptrs
        for buffers in self._complete_buffers():
            item_bytes = source.buffers.item_lengths[buffers[0]]
            for part in plan.parts(max(1, _IN_PLACE_BYTES // item_bytes)):
                for buffer in buffers:
                    if positions := self._sampled(buffer, part):
                        found = source.digest(buffer, part, *positions)
                        self._result.checksums.append(Checksum(buffer, *positions, found))
                yield part.direct(item_bytes).at_each(
                    [source.buffers.ptrs[buffer] for buffer in buffers], [targets[buffer] for buffer in buffers]
                )

    def _complete_buffers(self) -> Iterator[list[int]]:
        """All buffers, in order; complete ones of one item size together, as far as they fit a batch."""
        item_lengths = self.reading.source.buffers.item_lengths
        num_items = self.chunk.block.stop - self.chunk.block.start
        ahead = deque(buffers_by_layer(self.reading.layer_of_buffer))
        while ahead:
            buffers = [ahead.popleft()]
            item_bytes = item_lengths[buffers[0]]
            self._await_layer(buffers[0])
            while (
                ahead
                and item_lengths[ahead[0]] == item_bytes
                and (len(buffers) + 1) * num_items * item_bytes <= _IN_PLACE_BYTES
                and self._is_complete(ahead[0])
            ):
                buffers.append(ahead.popleft())
            yield buffers

    def _is_complete(self, buffer: int) -> bool:
        return self.chunk.progress.is_done(self.reading.layer_of_buffer[buffer])

    def _await_layer(self, buffer: int) -> None:
        if self._is_complete(buffer):
            return
        # The wait may be long. Meanwhile earlier writes, also those of other chunks, must be reported when they end.
        self.pipeline.drain()
        with self._waiting():
            self.chunk.progress.wait(self.reading.layer_of_buffer[buffer], lambda: self.chunk.is_cancelled)

    def _sampled(self, buffer: int, part: ChunkPart) -> tuple[int, int] | None:
        return sampled(self.reading.checksums, part.start, part.stop, buffer)


class Sender(Lanes[Chunk, SendRing]):
    def __init__(
        self,
        reading: Reading,
        rings: SendRings,
        connect: Callable[[Destination], Channel],
        silence: Callable[[Peer], float],
    ) -> None:
        super().__init__("send", connect, silence, rings.lend, rings.take_back)
        self._reading = reading

    def connected(self, decode: Peer, channel: Channel) -> None:
        packing = packing_of(channel.transport, self._reading.source.in_host_memory)
        log.info("route", decode=decode.address, transport=channel.transport, gathers=packing)

    def post(self, lane: Lane[Chunk, SendRing], pipeline: Pipeline, work: Chunk) -> None:
        outgoing = OutgoingChunk(work, self._reading, pipeline, lane.lent, lane.report)
        outgoing.post(may_post=lambda: lane.may_post(work))
