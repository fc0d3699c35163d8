"""Memory for pools: zeroed, page-aligned, and mappable by other processes of the host if asked for.

All pages are taken at start, so that the start fails rather than a request if the machine does not have them. A single
thread would take minutes for hundreds of GiB. A page lies on the memory node of the processor that touches it first.
"""

import ctypes
import errno
import math
import mmap
import os
import secrets
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress

import structlog
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from base.errors import StartupError
from base.memory import human
from transfer.memory import SharedMemory

log = structlog.get_logger(__name__)

_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14. Neither ctypes nor mmap has a name for it."""
_PIECE = 256 << 20
"""Bytes per madvise call: large enough to keep a thread in the kernel, small enough to notice an interrupt."""
_MAX_THREADS = 16
"""Clearing pages is bound by memory bandwidth, which this many processors use up."""
_WORTH_SHOWING = 1 << 30


class HostMemory:
    """A piece of memory cut into tensors.

    Shareable memory is a memfd, not a file in /dev/shm: its name cannot collide or outlive it, and the kernel frees it
    with the last process that maps it.
    """

    def __init__(
        self, num_bytes: int, shareable: bool, cpus: Collection[int] | None = None, populated: bool = True
    ) -> None:
        """cpus: processors near which the memory should lie. populated: have the machine give all pages at once, not
        at their first use. Raises StartupError if it does not have them.
        """
        length = max(mmap.PAGESIZE, page_aligned(num_bytes))
        self.shared: SharedMemory | None = None
        """How another process maps it; None if it is not shareable or was closed."""
        if shareable:
            name = f"hisparse-pd-{secrets.token_hex(16)}"
            fd = os.memfd_create(name)
            os.ftruncate(fd, length)
            self._memory = mmap.mmap(fd, length)
            self.shared = SharedMemory(pid=os.getpid(), fd=fd, name=name, base=self._address, length=length)
        else:
            # Private, since Linux gives shared memory large pages only where an administrator wants it to.
            self._memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Pinned pages of private memory would be copied for a child process at once, all of them.
            self._memory.madvise(mmap.MADV_DONTFORK)
        # Scattered items in 4 KiB pages spend as long on address translation as on copying.
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if populated:
            populate(self._address, length, cpus)

    def tensor(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A uint8 tensor `offset` bytes into the memory, which it keeps alive."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=offset).view(shape)

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> None:
        """Let no other process map it any more. Its last tensor and its last mapping free the memory."""
        if self.shared is not None:
            os.close(self.shared.fd)
            self.shared = None


def page_aligned(num_bytes: int) -> int:
    """The next offset at which a memory page begins."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def populate(address: int, num_bytes: int, cpus: Collection[int] | None = None) -> None:
    """Have the machine give every page of [address, address + num_bytes), new memory that starts at a page.

    cpus: processors near which the memory should lie, if there is enough; None: any. Shows a progress bar on a terminal
    for large memory. Raises StartupError if the machine does not have the memory.
    """
    started = time.monotonic()
    pieces = [(address + at, min(_PIECE, num_bytes - at)) for at in range(0, num_bytes, _PIECE)]
    near = cpus or os.sched_getaffinity(0)
    threads = min(_MAX_THREADS, len(near), max(1, len(pieces)))
    large = num_bytes >= _WORTH_SHOWING
    with (
        ThreadPoolExecutor(threads, "populate", initializer=os.sched_setaffinity, initargs=(0, near)) as pool,
        _progress(shown=large) as progress,
    ):
        task = progress.add_task("taking host memory", total=num_bytes)
        try:
            for piece in as_completed([pool.submit(_populate, *piece) for piece in pieces]):
                progress.advance(task, piece.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if large:
        log.info(
            "host memory taken", bytes=human(num_bytes), threads=threads, seconds=round(time.monotonic() - started, 2)
        )


def _populate(address: int, length: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0:
        return length
    if (code := ctypes.get_errno()) != errno.EINVAL:
        raise StartupError(
            f"the machine does not have the memory of the host pool ({os.strerror(code)}): "
            "lower host_to_device_ratio or host_pool_gib"
        )
    ctypes.memset(address, 0, length)  # an older kernel
    return length


def _progress(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not (shown and sys.stderr.isatty()),
        transient=True,
    )
