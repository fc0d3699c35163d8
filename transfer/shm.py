"""Writes into the memory of another process of the same host, and reads it, through a mapping of it."""

import ctypes
import mmap
import os
import select
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache

import structlog

from transfer.copy_runs import JointCopy, all_within
from transfer.memory import SharedMemory, Transport
from transfer.planner import NO_LIMIT, Descriptors
from transfer.writer import Outcome, Pending, TransferError

log = structlog.get_logger(__name__)

COPY_THREADS = min(4, os.cpu_count() or 1)
"""Threads that copy a batch, the one that waits for it included."""


class NotShared(Exception):
    """The memory cannot be mapped from here: another host, another container, another user."""


@cache
def _helpers() -> ThreadPoolExecutor:
    """The other threads, shared by all channels."""
    return ThreadPoolExecutor(max(1, COPY_THREADS - 1), thread_name_prefix="shm-copy")


class SharedMemoryChannel:
    """Copies into a mapping of the owner's memory. Raises NotShared if it cannot be mapped.

    The random name of the memory tells whether it is the right one: process numbers of containers may coincide.
    """

    transport: Transport = "shm"
    max_batch = NO_LIMIT
    max_bytes = NO_LIMIT
    attempts = 1

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        with ExitStack() as on_refusal:
            try:
                # First, so that it stands for the process whose descriptor is opened next.
                self._process = os.pidfd_open(memory.pid)
                on_refusal.callback(os.close, self._process)
                self._mapping = self._map(memory)
            except OSError as error:
                raise NotShared(error.strerror) from error
            on_refusal.pop_all()
        self._here = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @staticmethod
    def _map(memory: SharedMemory) -> mmap.mmap:
        path = f"/proc/{memory.pid}/fd/{memory.fd}"
        if not os.readlink(path).startswith(f"/memfd:{memory.name} "):
            raise NotShared("the process of that number here has no such memory")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != memory.length:
                raise NotShared(f"the memory has {os.fstat(descriptor).st_size} bytes, not {memory.length}")
            mapping = mmap.mmap(descriptor, memory.length)
        finally:
            os.close(descriptor)
        with suppress(OSError):
            # Whoever touches a page first decides its size.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def submit(self, batch: Descriptors) -> Pending:
        if not all_within(batch, self._memory.base, self._memory.length):
            return _Refused()
        return self._started(_Copy(batch, shift=self._shift))

    @property
    def _shift(self) -> int:
        """By how much further on the owner's memory lies here."""
        return self._here - self._memory.base

    def _started(self, copy: "_Copy") -> Pending:
        # If no thread can be started, the thread that waits copies all of it.
        with suppress(RuntimeError):
            for _ in range(COPY_THREADS - 1):
                _helpers().submit(copy.help)
        return copy

    def check(self) -> None:
        """The mapping outlives its owner: what was copied after the owner's end is lost."""
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        if poller.poll(0):
            raise TransferError("the process that owns the memory has ended")

    def close(self) -> None:
        self._mapping.close()
        os.close(self._process)


class SharedMemoryReads(SharedMemoryChannel):
    """Copies out of a mapping of the owner's memory, likewise: sources are addresses of the owner."""

    def submit(self, batch: Descriptors) -> Pending:
        sources, destinations, lengths = batch
        if not all_within(Descriptors(destinations, sources, lengths), self._memory.base, self._memory.length):
            return _Refused()
        return self._started(_Copy(Descriptors(sources + self._shift, destinations, lengths), shift=0))


class _Copy(JointCopy):
    def wait(self) -> Outcome:
        try:
            self.finish()
        except Exception:
            # Whatever it is: `finish` raises when no thread copies any more, so nothing is in flight.
            log.exception("a copy into shared memory failed")
            return Outcome.FAILED
        return Outcome.LANDED


class _Refused:
    def wait(self) -> Outcome:
        return Outcome.FAILED
