"""Reads KV out of the prefill pool: packed into send buffers, or in place."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcache.layout import buffer_info
from prefill_node.plan import ChunkPart
from prefill_node.ring import SendBuffer
from transfer.checksum import digest, item_ranges
from transfer.choices import ChecksumMode
from transfer.copy_runs import copy_runs, stream_runs
from transfer.memory import BufferInfo

_pack = copy_runs if (os.cpu_count() or 1) > 2 else stream_runs
"""Through the cache, so that sending reads from there. On one or two cores packing itself delays sending, so there the
copy past the cache is used, which takes less time."""


class KVSource(Protocol):
    """The pool's buffers. Each lane reads them on its own thread."""

    buffers: BufferInfo
    in_host_memory: bool

    def gather(self, buffer: int, part: ChunkPart, into: SendBuffer) -> None:
        """Pack a part's items into a send buffer, in the order of positions. Complete on return."""
        ...

    def digest(self, buffer: int, part: ChunkPart, start: int, stop: int) -> int:
        """Checksum of positions [start, stop) of a part, read in place."""
        ...


class HostSource:
    """A pool in host memory."""

    in_host_memory = True

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: one tensor [rows, dim] per buffer."""
        self._layers = layers  # kept alive, since they are read by address
        self.buffers = buffer_info(layers)

    def gather(self, buffer: int, part: ChunkPart, into: SendBuffer) -> None:
        runs, _ = part.packed(self.buffers.item_lengths[buffer])
        _pack(runs.at(self.buffers.ptrs[buffer], into.address))

    def digest(self, buffer: int, part: ChunkPart, start: int, stop: int) -> int:
        return digest(item_ranges(self.buffers, buffer, part.items[start - part.start : stop - part.start]))


class DeviceSource:
    """A pool in CUDA memory: items are packed on the device and copied out on a stream of their own.

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

    source: KVSource
    layer_of_buffer: tuple[int, ...]
    page_size: int
    checksums: ChecksumMode

    def buffers_in_order(self) -> list[int]:
        return sorted(range(len(self.layer_of_buffer)), key=lambda buffer: self.layer_of_buffer[buffer])
