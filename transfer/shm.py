"""Writes into the memory of another process of the same host, and reads it, through a mapping of it."""

import ctypes
import mmap
import os
import select
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import structlog

from transfer.memory import RemotePool, SharedMemory
from transfer.planner import NO_LIMIT, Descriptors
from transfer.transport import Endpoint, TransportKind, Unreachable
from transfer.writer import Outcome, Pending, TransferError

if TYPE_CHECKING:
    from transfer.copy_runs import JointCopy

log = structlog.get_logger(__name__)

COPY_THREADS = min(4, os.cpu_count() or 1)
"""Threads that copy a batch, the one that waits for it included."""


@cache
def _helpers() -> ThreadPoolExecutor:
    """The other threads, shared by all channels."""
    return ThreadPoolExecutor(max(1, COPY_THREADS - 1), thread_name_prefix="shm-copy")


class SharedMemoryChannel:
    """Copies into a mapping of the owner's memory. Raises Unreachable if it cannot be mapped.

    The random name of the memory tells whether it is the right one: process numbers of containers may coincide.
    """

    transport = SharedMemory.transport
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
                raise Unreachable(error.strerror) from error
            on_refusal.pop_all()
        self._here = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @staticmethod
    def _map(memory: SharedMemory) -> mmap.mmap:
        path = f"/proc/{memory.pid}/fd/{memory.fd}"
        if not os.readlink(path).startswith(f"/memfd:{memory.name} "):
            raise Unreachable("the process of that number here has no such memory")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != memory.length:
                raise Unreachable(f"the memory has {os.fstat(descriptor).st_size} bytes, not {memory.length}")
            mapping = mmap.mmap(descriptor, memory.length)
        finally:
            os.close(descriptor)
        with suppress(OSError):
            # Whoever touches a page first decides its size.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def submit(self, batch: Descriptors) -> Pending:
        if not batch.writes_within(self._memory.base, self._memory.length):
            return _Refused()
        return self._start_copy(batch, shift=self._offset)

    @property
    def _offset(self) -> int:
        """Address in this process less the owner's address of the same byte."""
        return self._here - self._memory.base

    def _start_copy(self, batch: Descriptors, shift: int) -> Pending:
        # Imported here: the import compiles the copies, which a process that only offers memory does not need.
        from transfer.copy_runs import JointCopy

        copy = JointCopy(batch, shift)
        # If no thread can be started, the thread that waits copies all of it.
        with suppress(RuntimeError):
            for _ in range(COPY_THREADS - 1):
                _helpers().submit(copy.help)
        return _Copy(copy)

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
    """Copies out of a mapping of the owner's memory: sources are addresses of the owner."""

    def submit(self, batch: Descriptors) -> Pending:
        sources, destinations, lengths = batch
        if not Descriptors(destinations, sources, lengths).writes_within(self._memory.base, self._memory.length):
            return _Refused()
        return self._start_copy(Descriptors(sources + self._offset, destinations, lengths), shift=0)


@dataclass(frozen=True)
class _Copy:
    copy: "JointCopy"

    def wait(self) -> Outcome:
        try:
            self.copy.finish()
        except Exception:
            # `finish` raises when no thread copies any more, so nothing is in flight.
            log.exception("a copy into shared memory failed")
            return Outcome.FAILED
        return Outcome.LANDED


class _Refused:
    def wait(self) -> Outcome:
        return Outcome.FAILED


class _SharedMemoryEndpoint(Endpoint):
    def connect(self, pool: RemotePool, reading: bool) -> SharedMemoryChannel | None:
        if pool.shared is None:
            return None
        return SharedMemoryReads(pool.shared) if reading else SharedMemoryChannel(pool.shared)


SHM = TransportKind(
    name=SharedMemory.transport,
    start=lambda host, devices: _SharedMemoryEndpoint(),
    bytes_per_second=1.5e9,
    # Scattered copies into shared memory cost nothing extra. A processor reads device memory slowly.
    pack_host="never",
    pack_device="always",
    shares_memory=True,
)
