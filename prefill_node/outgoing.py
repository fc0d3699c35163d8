"""A chunk on its way to a decode node: what is posted, in which order, and from where."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import structlog

from control.messages import AttemptId, Checksum, Destination, Peer, Transport
from prefill_node.plan import ChunkPlan, Part
from prefill_node.progress import ForwardProgress, NotComputed
from prefill_node.ring import BUFFER_BYTES, SendBuffer, SendRing
from prefill_node.source import KVSource
from transfer.checksum import digest, sampled
from transfer.choices import ChecksumMode
from transfer.planner import Descriptors, Int64s
from transfer.writer import Outcome, Pipeline, TransferError, Write

log = structlog.get_logger(__name__)

_IN_PLACE_BYTES = 32 << 20
"""In one batch: an abort is heard between batches."""
_WHAT_FAILED = {
    Outcome.FAILED: "the decode node's transport cannot be reached or refuses a write",
    Outcome.CUT: "the connection was lost",
    Outcome.GIVEN_UP: "the transport gave a write up",
    Outcome.UNKNOWN: "nobody knows whether a write has ended",
}


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a request, to be written to the destination slots of those positions.

    `progress` is the forward pass that computes them. `cancelled` is asked again and again while they are sent.
    """

    attempt: AttemptId
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
    """A chunk's writes have all ended: landed, unless `error` says otherwise.

    `in_flight`: of some of them nobody knows whether they have, nor ever will. They may read the chunk's pages, and
    write to its slots, for as long as this process runs (`transfer.writer.Outcome.UNKNOWN`); `error` is set.
    `lingering`: the network may still carry bytes of those that failed, or of a first copy of one that was cut and has
    landed when it was posted again. `posted_at`, `ended_at`: of the first and the
    last of them (time.monotonic); `waited`: seconds in between in which there was nothing to post, or no leave to.
    """

    chunk: Chunk
    num_bytes: int = 0
    num_descriptors: int = 0
    posted_at: float | None = None
    ended_at: float = 0.0
    waited: float = 0.0
    checksums: list[Checksum] = field(default_factory=list)
    error: str | None = None
    lingering: bool = False
    in_flight: bool = False

    def seconds(self, since: float = 0.0) -> float:
        """What sending it took, or as much of that as came after `since`."""
        if self.posted_at is None:
            return 0.0
        return max(0.0, self.ended_at - max(self.posted_at, since) - self.waited)


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
    """One chunk, posted layer by layer as its forward pass finishes them.

    `report` is called once, when all that was posted of it has ended.
    """

    def __init__(
        self,
        chunk: Chunk,
        reading: Reading,
        pipeline: Pipeline,
        ring: Callable[[], SendRing],
        report: Callable[[Sent], None],
    ) -> None:
        """`ring` lends this thread's send buffers; it is called if they are needed."""
        self._chunk = chunk
        self._reading = reading
        self._pipeline = pipeline
        self._lend_ring = ring
        self._report = report
        self._sent = Sent(chunk)

    def post(self, may_post: Callable[[], bool]) -> None:
        """Post all of it, or as much as is wanted. Never raises: what goes wrong is reported.

        `may_post` is asked before each write; it may wait.
        """
        write = Write(on_end=lambda: self._end(write), go_on=lambda: self._go_on(may_post))
        try:
            for batch, buffer in self._batches():
                self._sent.num_bytes += int(batch.lengths.sum())
                self._sent.num_descriptors += len(batch.lengths)
                if not self._pipeline.post(write, batch, buffer):
                    self._sent.error = "aborted"
                    break
        except NotComputed:
            self._sent.error = "aborted"
        except Exception as error:
            # A bug costs the request, not the thread: the node waits for a report of every chunk.
            log.exception("sending failed", request_id=self._chunk.attempt.request_id)
            self._sent.error = f"sending failed: {error}"
        self._pipeline.close(write)

    def _go_on(self, may_post: Callable[[], bool]) -> bool:
        with self._waiting():
            goes_on = may_post()
        if goes_on and self._sent.posted_at is None:
            self._sent.posted_at = time.monotonic()
        return goes_on

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Time that is not spent on sending. Before the first write there is none that is."""
        since = time.monotonic()
        yield
        if self._sent.posted_at is not None:
            self._sent.waited += time.monotonic() - since

    def _end(self, write: Write) -> None:
        """All that was posted of it has ended, as far as will ever be known."""
        sent = self._sent
        sent.ended_at = time.monotonic()
        sent.lingering = write.lingers
        sent.in_flight = write.outcome is Outcome.UNKNOWN
        if write.outcome is not Outcome.LANDED:
            sent.error = _WHAT_FAILED[write.outcome]
        elif sent.error is None:
            try:
                self._pipeline.channel.check()
            except TransferError as error:
                sent.error = str(error)
            except Exception as error:
                log.exception("nobody knows whether the decode node lives", request_id=self._chunk.attempt.request_id)
                sent.error = f"sending failed: {error}"
        if sent.error is not None and sent.error != "aborted":
            log.warning(
                "transfer failed",
                request_id=self._chunk.attempt.request_id,
                epoch=self._chunk.attempt.epoch,
                decode=self._chunk.decode.address,
                error=sent.error,
            )
        self._report(sent)

    def _batches(self) -> Iterator[tuple[Descriptors, SendBuffer | None]]:
        """What to post, and the send buffers that it is read from."""
        chunk, reading = self._chunk, self._reading
        channel = self._pipeline.channel
        plan = ChunkPlan(chunk.pages, reading.page_size, chunk.slots, chunk.start, chunk.stop, channel.max_bytes)
        policy = gather_policy(channel.transport, reading.source.in_host_memory)
        if policy is Gather.ALWAYS or (policy is Gather.WHERE_IT_PAYS and plan.gathering_pays):
            yield from self._packed(plan, self._lend_ring())
        else:
            for batch in self._in_place(plan):
                yield batch, None

    def _packed(self, plan: ChunkPlan, ring: SendRing) -> Iterator[tuple[Descriptors, SendBuffer]]:
        """Part by part by way of send buffers."""
        source, targets = self._reading.source, self._chunk.destination.buffers.ptrs
        for buffer in self._reading.buffers_in_order():
            self._await_layer(buffer)
            item_bytes = source.buffers.item_lengths[buffer]
            for part in plan.parts(max(1, BUFFER_BYTES // item_bytes)):
                into = ring.take(self._pipeline)
                source.gather(buffer, part, into)
                if positions := self._checked(buffer, part):
                    start, stop = positions
                    at = into.address + (start - part.start) * item_bytes
                    self._note(buffer, positions, digest([(at, (stop - start) * item_bytes)]))
                _, out = part.packed(item_bytes)
                yield out.at(into.address, targets[buffer]), into

    def _in_place(self, plan: ChunkPlan) -> Iterator[Descriptors]:
        """From where it lies, as many buffers at a time as are complete."""
        source, targets = self._reading.source, self._chunk.destination.buffers.ptrs
        for buffers in self._complete():
            item_bytes = source.buffers.item_lengths[buffers[0]]
            for part in plan.parts(max(1, _IN_PLACE_BYTES // item_bytes)):
                for buffer in buffers:
                    if positions := self._checked(buffer, part):
                        self._note(buffer, positions, source.digest(buffer, part, *positions))
                yield part.direct(item_bytes).at_each(
                    [source.buffers.ptrs[buffer] for buffer in buffers], [targets[buffer] for buffer in buffers]
                )

    def _complete(self) -> Iterator[list[int]]:
        """All buffers, in order, those of one item size together that are complete at the same time and fit a batch."""
        item_lengths = self._reading.source.buffers.item_lengths
        num_items = self._chunk.stop - self._chunk.start
        ahead = deque(self._reading.buffers_in_order())
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
        return self._chunk.progress.is_done(self._reading.layer_of_buffer[buffer])

    def _await_layer(self, buffer: int) -> None:
        if self._is_complete(buffer):
            return
        # The wait may be long: what was posted before, of other chunks too, is reported when it ends.
        self._pipeline.drain()
        with self._waiting():
            self._chunk.progress.wait(self._reading.layer_of_buffer[buffer], self._chunk.cancelled)

    def _checked(self, buffer: int, part: Part) -> tuple[int, int] | None:
        return sampled(self._reading.checksums, part.start, part.stop, buffer)

    def _note(self, buffer: int, positions: tuple[int, int], value: int) -> None:
        start, stop = positions
        self._sent.checksums.append(Checksum(buffer=buffer, start=start, stop=stop, digest=value))
