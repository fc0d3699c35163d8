"""KV between the pool and the transports: in place, or by way of buffers in host memory."""

import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvcache.layout import buffer_info
from prefill_node.plan import ChunkPart
from transfer.checksum import Range, digest, item_ranges
from transfer.choices import ChecksumMode
from transfer.copy_runs import copy_runs, stream_runs
from transfer.memory import BufferInfo
from transfer.planner import Descriptors, Int64s, plan_runs
from transfer.writer import BATCHES_IN_FLIGHT, Pipeline, TransferError

BUFFER_BYTES = 5 << 19
"""Holds one layer of a chunk of 2048 tokens of 1152 bytes; a ring of them stays in the processor's cache."""


@dataclass(frozen=True, eq=False)
class SendBuffer:
    """memory: uint8 [BUFFER_BYTES]. address: of its first byte."""

    memory: torch.Tensor
    address: int


class SendRing:
    """The send buffers of one lane: as many as its pipeline may have batches in flight.

    A buffer is in use until the batch that was posted from it has ended. pin: lets a device copy straight into them.
    """

    def __init__(self, pin: bool) -> None:
        self.memory = torch.empty(BATCHES_IN_FLIGHT, BUFFER_BYTES, dtype=torch.uint8, pin_memory=pin)
        self._buffers = [SendBuffer(memory, memory.data_ptr()) for memory in self.memory]

    def take(self, pipeline: Pipeline) -> SendBuffer:
        """A buffer that no write in flight reads; waits for one.

        Raises TransferError if there will be none: each is held by a batch of unknown end.
        """
        while True:
            held = pipeline.held
            for buffer in self._buffers:
                if buffer not in held:
                    return buffer
            if pipeline.is_empty:
                raise TransferError("no send buffer is left: it is not known of any whether its last write has ended")
            pipeline.settle_oldest()


class SendRings:
    """Lends rings to lanes, and keeps those that come back for the next lane."""

    def __init__(self, pin: bool, register: Callable[[BufferInfo], None]) -> None:
        self._pin = pin
        self._register = register
        self._idle: queue.SimpleQueue[SendRing] = queue.SimpleQueue()

    def lend(self) -> SendRing:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            ring = SendRing(self._pin)
            self._register(buffer_info([ring.memory]))
            return ring

    def take_back(self, ring: SendRing) -> None:
        self._idle.put(ring)


_pack = copy_runs if (os.cpu_count() or 1) > 2 else stream_runs
"""Through the cache, so that sending reads from there. On one or two cores packing itself delays sending, so there the
copy past the cache is used, which takes less time."""


class HostSource:
    """A pool in host memory. Each lane reads it on its own thread."""

    in_host_memory = True

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: one tensor [rows, dim] per buffer."""
        self._layers = layers  # kept alive, since they are read by address
        self.buffers = buffer_info(layers)

    def gather(self, buffer: int, part: ChunkPart, into: SendBuffer) -> None:
        """Pack a part's items into a send buffer, in the order of positions. Complete on return."""
        runs, _ = part.packed(self.buffers.item_lengths[buffer])
        _pack(runs.at(self.buffers.ptrs[buffer], into.address))

    def digest(self, buffer: int, part: ChunkPart, start: int, stop: int) -> int:
        """Checksum of positions [start, stop) of a part, read in place."""
        return digest(item_ranges(self.buffers, buffer, part.items[start - part.start : stop - part.start]))


class DeviceSource:
    """As HostSource, of a pool in CUDA memory: items are packed on the device and copied out on a stream of their own.

    A part's row numbers are uploaded once, for all layers, and kept as long as the part.
    """

    in_host_memory = False

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.buffers = buffer_info(layers)
        self._layers = layers
        self._stream = torch.cuda.Stream(layers[0].device)  # type: ignore[no-untyped-call]

    def gather(self, buffer: int, part: ChunkPart, into: SendBuffer) -> None:
        self._copy(buffer, self._rows_of(part), into.memory)

    def digest(self, buffer: int, part: ChunkPart, start: int, stop: int) -> int:
        copy = torch.empty((stop - start) * self.buffers.item_lengths[buffer], dtype=torch.uint8)
        self._copy(buffer, self._rows_of(part)[start - part.start : stop - part.start], copy)
        return digest([(copy.data_ptr(), copy.nbytes)])

    def _rows_of(self, part: ChunkPart) -> torch.Tensor:
        """Uploaded on this source's stream, which also uses and frees them. Does not wait for the device."""
        if not part.uploaded:
            with torch.cuda.stream(self._stream):
                # A copy from memory that is not pinned waits for all that the stream has to do.
                pinned = torch.from_numpy(part.items).pin_memory()
                part.uploaded.append(pinned.to(self._layers[0].device, non_blocking=True))
        return part.uploaded[0]

    def _copy(self, buffer: int, rows: torch.Tensor, into: torch.Tensor) -> None:
        layer = self._layers[buffer]
        with torch.cuda.stream(self._stream):
            packed = layer.index_select(0, rows)
            into[: packed.nbytes].copy_(packed.view(torch.uint8).flatten(), non_blocking=True)
        self._stream.synchronize()


@dataclass(frozen=True)
class Reading:
    """How KV is read for sending. layer_of_buffer: the layer that completes each of the source's buffers."""

    source: HostSource | DeviceSource
    layer_of_buffer: tuple[int, ...]
    page_size: int
    checksums: ChecksumMode


_HOST_BYTES = 8 << 20
"""Of one piece: enough to be worth the planning, and few enough that digests are compared while the next is read."""


@dataclass(frozen=True)
class StagedRead:
    """Some items of one buffer that are being read.

    reads: what reads them. buffer: what they are read into, if it was lent. ranges: where items [first, stop) of the
    piece have landed, in their order. commit: puts what has landed, and was verified, into the pool, before it returns.
    """

    reads: Descriptors
    buffer: SendBuffer | None
    ranges: Callable[[int, int], list[Range]]
    commit: Callable[[], None]


class HostSink:
    """A pool in host memory: read straight into the pages. Each thread has a sink of its own.

    most_bytes: of a piece.
    """

    most_bytes = _HOST_BYTES

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: one tensor [rows, dim] per buffer."""
        self._layers = layers  # kept alive, since they are written by address
        self.buffers = buffer_info(layers)

    def stage(self, buffer: int, rows: Int64s, slots: Int64s, source: int, pipeline: Pipeline) -> StagedRead:
        """Item `slots[i]` of a buffer at address `source` elsewhere is to become item `rows[i]` of ours: int64 [n].

        pipeline: what it is read with. May wait for reads that are in flight.
        """
        runs = plan_runs(slots, rows).descriptors(self.buffers.item_lengths[buffer])
        return StagedRead(
            runs.at(source, self.buffers.ptrs[buffer]),
            None,
            ranges=lambda first, stop: item_ranges(self.buffers, buffer, rows[first:stop]),
            commit=lambda: None,
        )

    def close(self) -> None:
        """It has nothing."""


class DeviceSink:
    """As HostSink, of a pool in CUDA memory: read into pinned buffers, verified, and copied on a stream of its own."""

    most_bytes = BUFFER_BYTES

    def __init__(self, layers: Sequence[torch.Tensor], rings: SendRings) -> None:
        """rings: lend the buffers, at the first use."""
        self._layers = layers
        self.buffers = buffer_info(layers)
        self._rings = rings
        self._ring: SendRing | None = None
        # Before the kernels of a pass that is under way: it may wait for what is copied.
        self._stream = torch.cuda.Stream(layers[0].device, priority=-1)  # type: ignore[no-untyped-call]

    def stage(self, buffer: int, rows: Int64s, slots: Int64s, source: int, pipeline: Pipeline) -> StagedRead:
        if self._ring is None:
            self._ring = self._rings.lend()
        into, item_bytes = self._ring.take(pipeline), self.buffers.item_lengths[buffer]
        sources, at, lengths = plan_packed(slots, item_bytes)
        return StagedRead(
            Descriptors(source + sources, into.address + at, lengths),
            into,
            ranges=lambda first, stop: [(into.address + first * item_bytes, (stop - first) * item_bytes)],
            commit=lambda: self._copy(into.memory[: len(rows) * item_bytes], rows, self._layers[buffer]),
        )

    def close(self) -> None:
        if self._ring is not None:
            self._rings.take_back(self._ring)
            self._ring = None

    def _copy(self, packed: torch.Tensor, rows: Int64s, layer: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            items = packed.to(layer.device, non_blocking=True).view(layer.dtype).view(len(rows), -1)
            layer.index_copy_(0, torch.from_numpy(rows).pin_memory().to(layer.device, non_blocking=True), items)
        self._stream.synchronize()


KVSink = HostSink | DeviceSink


def plan_packed(slots: Int64s, item_bytes: int) -> Descriptors:
    """Items `slots`, int64 [n], one after another: offsets in bytes there and here."""
    into, _ = plan_runs(slots, slots).pack()
    return into.descriptors(item_bytes)
