"""Send buffers in host memory, for KV that is not sent in place; what is not read in place is read into them, too."""

import queue
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcache.layout import buffer_info
from transfer.memory import BufferInfo
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
