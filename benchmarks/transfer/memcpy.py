"""Plain memcpy into memory that a process of the same host shares: what large writes take without a network."""

import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from benchmarks.transfer.methods import MethodFailed
from transfer.memory import SharedMemory
from transfer.planner import Descriptors

Copy = Callable[[Descriptors], None]


def memmove(batch: Descriptors) -> None:
    """The C library's memmove, piece by piece. Other threads run on meanwhile."""
    for source, destination, length in zip(*(column.tolist() for column in batch), strict=True):
        ctypes.memmove(destination, source, length)


class CopyThreads:
    """Copies descriptors whose destinations are the owner's addresses, spread over threads by bytes."""

    def __init__(self, memory: SharedMemory, threads: int) -> None:
        """Raises MethodFailed if the memory cannot be mapped from here."""
        try:
            fd = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise MethodFailed(f"cannot map the target's memory: {error}") from error
        try:
            self._mapping = mmap.mmap(fd, memory.length)
        finally:
            os.close(fd)
        self._offset = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)) - memory.base
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def copy(self, batch: Descriptors, how: Copy) -> None:
        """Copy everything, `how` being called once per thread with its share."""
        here = batch._replace(destinations=batch.destinations + self._offset)
        done = batch.lengths.cumsum()
        cuts = [int(done.searchsorted(done[-1] * i / self._threads)) for i in range(self._threads)] + [len(done)]
        shares = [Descriptors(*(column[a:b] for column in here)) for a, b in pairwise(cuts)]
        list(self._pool.map(how, shares))

    def close(self) -> None:
        self._pool.shutdown()
        self._mapping.close()
