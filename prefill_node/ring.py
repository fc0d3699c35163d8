"""Send buffers in host memory, for what does not go out from where it lies."""

import threading
from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple

import torch

from prefill_node.pool import buffer_info
from transfer.messages import BufferInfo
from transfer.writer import BATCHES_IN_FLIGHT

BUFFER_BYTES = 5 << 19
"""Room for one layer of a chunk of 2048 tokens of 1152 bytes; a ring of them stays in the processor's cache."""


class SendBuffer(NamedTuple):
    """memory: uint8 [BUFFER_BYTES]. address: of its first byte."""

    memory: torch.Tensor
    address: int


class SendRing:
    """Buffers of BUFFER_BYTES, used in turn: as many as a writer has in flight, so the next one is always free.

    With `pin` a device copies to them without a detour.
    """

    def __init__(self, pin: bool) -> None:
        self._memory = torch.empty(BATCHES_IN_FLIGHT, BUFFER_BYTES, dtype=torch.uint8, pin_memory=pin)
        self._buffers = cycle([SendBuffer(memory, memory.data_ptr()) for memory in self._memory])

    def take(self) -> SendBuffer:
        return next(self._buffers)

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
