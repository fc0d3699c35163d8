"""Where KV that is read from a decode node lands: in the pool's pages, or in a buffer in host memory first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvcache.layout import buffer_info
from prefill_node.ring import BUFFER_BYTES, SendBuffer, SendRing, SendRings
from transfer.checksum import Range, item_ranges
from transfer.planner import Descriptors, Int64s, plan_runs
from transfer.writer import Pipeline

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
