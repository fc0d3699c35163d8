"""Has the machine give a pool's pages at start: on several threads, near the device, with a progress bar.

A single thread takes minutes to touch hundreds of GiB, and a page lies on the memory node of the processor that touches
it first. If the machine does not have the memory, the start fails rather than a request.
"""

import ctypes
import errno
import os
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, as_completed

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from base.errors import StartupError
from base.memory import human

log = structlog.get_logger(__name__)

_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14. Neither ctypes nor mmap has a name for it."""
_PIECE = 256 << 20
"""Bytes per madvise call: large enough to keep a thread in the kernel, small enough to notice an interrupt."""
_MAX_THREADS = 16
"""Clearing pages is bound by memory bandwidth, which so many processors use up."""
_WORTH_SHOWING = 1 << 30


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
