"""What large writes take without this project: Mooncake by itself, and memcpy into memory of another process."""

import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from benchmarks.transfer.methods import MethodFailed
from transfer.memory import SharedMemory
from transfer.planner import Descriptors

_DONE, _FAILED = 1, -1
_WINDOW = 128
_BATCH = 256
"""Of a synchronous call; the TCP transport refuses some 2000."""
_POLL_S = 0.0002


class RawEngine:
    """The engine by which this project sends, used without it: the same connections, the same settings."""

    def __init__(self, mooncake: Any) -> None:
        self._engine = mooncake

    def submit_and_poll(self, session: str, batch: Descriptors) -> None:
        """Submit descriptors one by one, some in flight at a time, and sleep between looks at the oldest."""
        posted: deque[int] = deque()
        for source, destination, length in zip(*(column.tolist() for column in batch), strict=True):
            if len(posted) == _WINDOW:
                self._await(posted.popleft())
            handle = self._engine.transfer_submit_write(session, source, destination, length)
            if handle <= 0:
                raise MethodFailed(f"Mooncake took no write to {session}")
            posted.append(handle)
        while posted:
            self._await(posted.popleft())

    def call_synchronously(self, session: str, batch: Descriptors) -> None:
        """Batches, each in a call that returns when it has landed."""
        sources, destinations, lengths = (column.tolist() for column in batch)
        for first in range(0, len(lengths), _BATCH):
            part = slice(first, first + _BATCH)
            if self._engine.batch_transfer_sync_write(session, sources[part], destinations[part], lengths[part]) != 0:
                raise MethodFailed(f"Mooncake failed to write a batch to {session}")

    def _await(self, handle: int) -> None:
        while (status := self._engine.transfer_check_status(handle)) != _DONE:
            if status == _FAILED:
                raise MethodFailed("Mooncake failed to write a descriptor")
            time.sleep(_POLL_S)


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
