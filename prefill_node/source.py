"""Reading KV out of the prefill pool: packed into send buffers, or where it lies."""

import os
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from control.messages import BufferInfo
from engine.paged_pool import buffer_info
from prefill_node.plan import Part
from prefill_node.ring import SendBuffer
from transfer.checksum import digest, item_ranges
from transfer.copy_runs import copy_runs, stream_runs

_pack = copy_runs if (os.cpu_count() or 1) > 2 else stream_runs
"""What is packed is sent next, and sending out of the cache takes less time. But where one or two processors pack, send
and do all else, packing is in the way of sending: then what counts is that it takes less."""


class KVSource(Protocol):
    """The pool's buffers, read by one thread per session."""

    buffers: BufferInfo
    in_host_memory: bool

    def gather(self, buffer: int, part: Part, into: SendBuffer) -> None:
        """Pack a part's items, in the order of positions, into a send buffer; complete on return."""
        ...

    def digest(self, buffer: int, part: Part, start: int, stop: int) -> int:
        """Checksum of positions [start, stop) of a part, where they lie."""
        ...


class HostSource:
    """A pool in host memory."""

    in_host_memory = True

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: one tensor [rows, dim] per buffer."""
        self._layers = layers
        """Kept alive: they are read by address."""
        self.buffers = buffer_info(layers)

    def gather(self, buffer: int, part: Part, into: SendBuffer) -> None:
        runs, _ = part.packed(self.buffers.item_lengths[buffer])
        _pack(runs.at(self.buffers.ptrs[buffer], into.address))

    def digest(self, buffer: int, part: Part, start: int, stop: int) -> int:
        return digest(item_ranges(self.buffers, buffer, part.items[start - part.start : stop - part.start]))


class DeviceSource:
    """A pool in CUDA memory: items are packed on the device and copied out on a stream of their own.

    Which rows a part has is uploaded once, for all layers, and kept for as long as the part is.
    """

    in_host_memory = False

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.buffers = buffer_info(layers)
        self._layers = layers
        self._stream = torch.cuda.Stream(layers[0].device)  # type: ignore[no-untyped-call]
        self._rows: WeakKeyDictionary[Part, torch.Tensor] = WeakKeyDictionary()
        """On the device, int64, of the parts that are being sent. A part belongs to one thread."""

    def gather(self, buffer: int, part: Part, into: SendBuffer) -> None:
        self._copy(buffer, self._rows_of(part), into.memory)

    def digest(self, buffer: int, part: Part, start: int, stop: int) -> int:
        copy = torch.empty((stop - start) * self.buffers.item_lengths[buffer], dtype=torch.uint8)
        self._copy(buffer, self._rows_of(part)[start - part.start : stop - part.start], copy)
        return digest([(copy.data_ptr(), copy.nbytes)])

    def _rows_of(self, part: Part) -> torch.Tensor:
        """On this source's stream, on which they are used and given back, too. Does not wait for the device."""
        rows = self._rows.get(part)
        if rows is None:
            with torch.cuda.stream(self._stream):
                # A copy from memory that is not pinned waits for all that the stream has to do.
                pinned = torch.from_numpy(part.items).pin_memory()
                rows = self._rows[part] = pinned.to(self._layers[0].device, non_blocking=True)
        return rows

    def _copy(self, buffer: int, rows: torch.Tensor, into: torch.Tensor) -> None:
        layer = self._layers[buffer]
        with torch.cuda.stream(self._stream):
            packed = layer.index_select(0, rows)
            into[: packed.nbytes].copy_(packed.view(torch.uint8).flatten(), non_blocking=True)
        self._stream.synchronize()
