"""Where KV that is read from a decode node lands: in the pool's pages, or in a buffer beside the device first."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kvcache.layout import buffer_info
from prefill_node.ring import BUFFER_BYTES, SendBuffer, SendRing, SendRings
from transfer.checksum import Range, item_ranges
from transfer.memory import BufferInfo
from transfer.planner import Descriptors, Int64s, plan_runs
from transfer.writer import Pipeline

_HOST_BYTES = 8 << 20
"""Of one piece: enough to be worth the planning, and few enough that digests are compared while the next is read."""


class Landing(Protocol):
    """Some items of one buffer that are being read."""

    @property
    def buffer(self) -> SendBuffer | None:
        """What they are read into, if it was lent."""
        ...

    @property
    def reads(self) -> Descriptors:
        """What reads them."""
        ...

    def ranges(self, first: int, stop: int) -> list[Range]:
        """Where items [first, stop) of the piece have landed, in their order."""
        ...

    def keep(self) -> None:
        """Put what has landed, and was verified, into the pool. Complete on return."""
        ...


class KVSink(Protocol):
    """The buffers of the pool that KV is read into. Each thread has a sink of its own."""

    buffers: BufferInfo
    most_bytes: int
    """Of a piece."""

    def land(self, buffer: int, rows: Int64s, slots: Int64s, source: int, pipeline: Pipeline) -> Landing:
        """Item `slots[i]` of a buffer at address `source` elsewhere is to become item `rows[i]` of ours: int64 [n].

        pipeline: what it is read with. May wait for reads that are in flight.
        """
        ...

    def close(self) -> None:
        """Nothing is read any more."""
        ...


class HostSink:
    """A pool in host memory: read straight into the pages."""

    most_bytes = _HOST_BYTES

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: one tensor [rows, dim] per buffer."""
        self._layers = layers  # kept alive, since they are written by address
        self.buffers = buffer_info(layers)

    def land(self, buffer: int, rows: Int64s, slots: Int64s, source: int, pipeline: Pipeline) -> Landing:
        return _InPages(self.buffers, buffer, rows, slots, source)

    def close(self) -> None:
        """It has nothing."""


class _InPages:
    buffer: SendBuffer | None = None

    def __init__(self, buffers: BufferInfo, number: int, rows: Int64s, slots: Int64s, source: int) -> None:
        runs = plan_runs(slots, rows).descriptors(buffers.item_lengths[number])
        self.reads = runs.at(source, buffers.ptrs[number])
        self._buffers, self._number, self._rows = buffers, number, rows

    def ranges(self, first: int, stop: int) -> list[Range]:
        return item_ranges(self._buffers, self._number, self._rows[first:stop])

    def keep(self) -> None:
        """They are in the pages already."""


class DeviceSink:
    """A pool in CUDA memory: read into pinned buffers, verified there, and copied to pages on a stream of its own."""

    most_bytes = BUFFER_BYTES

    def __init__(self, layers: Sequence[torch.Tensor], rings: SendRings) -> None:
        """rings: lend the buffers, at the first use."""
        self._layers = layers
        self.buffers = buffer_info(layers)
        self._rings = rings
        self._ring: SendRing | None = None
        # Before the kernels of a pass that is under way: it may wait for what is copied.
        self._stream = torch.cuda.Stream(layers[0].device, priority=-1)  # type: ignore[no-untyped-call]

    def land(self, buffer: int, rows: Int64s, slots: Int64s, source: int, pipeline: Pipeline) -> Landing:
        if self._ring is None:
            self._ring = self._rings.lend()
        return _InBuffer(self._layers[buffer], self._stream, self._ring.take(pipeline), rows, slots, source)

    def close(self) -> None:
        if self._ring is not None:
            self._rings.take_back(self._ring)
            self._ring = None


class _InBuffer:
    def __init__(
        self,
        layer: torch.Tensor,
        stream: torch.cuda.Stream,
        buffer: SendBuffer,
        rows: Int64s,
        slots: Int64s,
        source: int,
    ) -> None:
        self._item_bytes = layer.shape[1] * layer.itemsize
        sources, into, lengths = plan_packed(slots, self._item_bytes)
        self.reads = Descriptors(source + sources, buffer.address + into, lengths)
        self.buffer = buffer
        self._layer, self._stream, self._rows = layer, stream, rows

    def ranges(self, first: int, stop: int) -> list[Range]:
        assert self.buffer is not None
        return [(self.buffer.address + first * self._item_bytes, (stop - first) * self._item_bytes)]

    def keep(self) -> None:
        assert self.buffer is not None
        with torch.cuda.stream(self._stream):
            packed = self.buffer.memory[: len(self._rows) * self._item_bytes].to(self._layer.device, non_blocking=True)
            rows = torch.from_numpy(self._rows).pin_memory().to(self._layer.device, non_blocking=True)
            self._layer.index_copy_(0, rows, packed.view(self._layer.dtype).view(len(rows), -1))
        self._stream.synchronize()


def plan_packed(slots: Int64s, item_bytes: int) -> Descriptors:
    """Items `slots`, int64 [n], one behind another: offsets in bytes there and here."""
    into, _ = plan_runs(slots, slots).pack()
    return into.descriptors(item_bytes)
