"""Shared memory: copies into and out of a mapping of another process's memory, on the same host."""

import ctypes
import mmap
import os
import secrets
import select
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from typing import TYPE_CHECKING

import structlog

from transfer.memory import RemotePool, SharedMemory
from transfer.planner import NO_LIMIT, Descriptors, all_within
from transfer.transport import TransferEndpoint, TransportKind, Unreachable
from transfer.writer import Outcome, Pending, TransferError

if TYPE_CHECKING:
    from transfer.copy_runs import JointCopy

log = structlog.get_logger(__name__)

COPY_THREADS = min(4, os.cpu_count() or 1)
"""Threads per batch, including the one that waits for it."""


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, COPY_THREADS - 1), thread_name_prefix="shm-copy")


class SharedMemoryChannel:
    """Copies into a mapping of the owner's memory, or out of it (`reading`).

    Raises Unreachable if another host, container or user owns it. The memory's random name identifies it, since process
    numbers of containers may coincide.
    """

    transport = SharedMemory.transport
    max_batch = NO_LIMIT
    max_bytes = NO_LIMIT
    attempts = 1

    def __init__(self, memory: SharedMemory, reading: bool = False) -> None:
        self._memory = memory
        self._reading = reading
        with ExitStack() as on_refusal:
            try:
                # First, so that it names the process whose descriptor is opened next.
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
            # The first process that touches a page decides its size.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def submit(self, batch: Descriptors) -> Pending:
        # Imported here: the import compiles the copies, which a process that only offers memory does not need.
        from transfer.copy_runs import JointCopy

        sources, destinations, lengths = batch
        owners = sources if self._reading else destinations
        if not all_within(owners, lengths, self._memory.base, self._memory.length):
            return lambda: Outcome.FAILED
        shift = self._here - self._memory.base
        copy = (
            JointCopy(Descriptors(sources + shift, destinations, lengths), shift=0)
            if self._reading
            else JointCopy(batch, shift)
        )
        # If no thread can be started, the thread that waits copies all of it.
        with suppress(RuntimeError):
            for _ in range(COPY_THREADS - 1):
                _helpers().submit(copy.help)
        return partial(_outcome_of, copy)

    def check(self) -> None:
        """The mapping outlives its owner. Bytes copied after the owner's end are lost."""
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        if poller.poll(0):
            raise TransferError("the process that owns the memory has ended")

    def close(self) -> None:
        self._mapping.close()
        os.close(self._process)


def _outcome_of(copy: "JointCopy") -> Outcome:
    try:
        copy.finish()
    except Exception:
        # `finish` raises when no thread copies any more, so nothing is in flight.
        log.exception("a copy into shared memory failed")
        return Outcome.FAILED
    return Outcome.LANDED


class _SharedMemoryEndpoint(TransferEndpoint):
    def connect(self, pool: RemotePool, reading: bool) -> SharedMemoryChannel | None:
        return None if pool.shared is None else SharedMemoryChannel(pool.shared, reading)


def maps_other_processes() -> bool:
    """Whether this process may map memory of others of its user. Some containers and hardened kernels refuse."""
    name = secrets.token_hex(16)
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    with subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,)) as other:
        memory = SharedMemory(pid=other.pid, fd=descriptor, name=name, base=0, length=mmap.PAGESIZE)
        try:
            SharedMemoryChannel(memory).close()
        except Unreachable:
            return False
        finally:
            other.kill()
            os.close(descriptor)
    return True


SHM = TransportKind(
    name=SharedMemory.transport,
    start=lambda host, devices: _SharedMemoryEndpoint(),
    bytes_per_second=1.5e9,
    # Scattered copies into shared memory cost nothing extra. A processor reads device memory slowly.
    pack_host="never",
    pack_device="always",
    shares_memory=True,
)
