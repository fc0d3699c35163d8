"""Send buffers in host memory, for what does not go out from where it lies."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from control.messages import BufferInfo
from engine.paged_pool import buffer_info
from transfer.writer import BATCHES_IN_FLIGHT, Pipeline, TransferError

BUFFER_BYTES = 5 << 19
"""Room for one layer of a chunk of 2048 tokens of 1152 bytes; a ring of them stays in the processor's cache."""


@dataclass(frozen=True, eq=False)
class SendBuffer:
    """memory: uint8 [BUFFER_BYTES]. address: of its first byte."""

    memory: torch.Tensor
    address: int


class SendRing:
    """Buffers of BUFFER_BYTES for the thread of one pipeline: as many as that has batches in flight.

    A buffer belongs to what was posted from it, until that has ended.
    With `pin` a device copies to them without a detour.
    """

    def __init__(self, pin: bool) -> None:
        self._memory = torch.empty(BATCHES_IN_FLIGHT, BUFFER_BYTES, dtype=torch.uint8, pin_memory=pin)
        self._buffers = [SendBuffer(memory, memory.data_ptr()) for memory in self._memory]

    def take(self, pipeline: Pipeline) -> SendBuffer:
        """One that nothing in flight is read from; waits until there is one.

        Raises TransferError if there will be none: each is held by a batch of which nobody knows whether it has ended.
        """
        while True:
            held = pipeline.held
            for buffer in self._buffers:
                if buffer not in held:
                    return buffer
            if pipeline.is_empty:
                raise TransferError("no send buffer is left: it is not known of any whether its last write has ended")
            pipeline.settle_oldest()

    def get_contiguous_buf_infos(self) -> BufferInfo:
        """For registration with a transport."""
        return buffer_info([self._memory])


class SendRings:
    """Rings that are lent to the threads that send. They are kept: there are never many."""

    def __init__(self, pin: bool, register: Callable[[BufferInfo], None]) -> None:
        self._pin = pin
        self._register = register
        self._idle: list[SendRing] = []
        self._lock = threading.Lock()
        """Guards _idle."""

    def lend(self) -> SendRing:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        ring = SendRing(self._pin)
        self._register(ring.get_contiguous_buf_infos())
        return ring

    def take_back(self, ring: SendRing) -> None:
        with self._lock:
            self._idle.append(ring)
