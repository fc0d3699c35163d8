"""Memory for pools: zeroed, page-aligned, and mappable by other processes of the host if asked for."""

import ctypes
import math
import mmap
import os
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvcache.populate import populate


@dataclass(frozen=True)
class SharedRegion:
    """How another process maps the memory: by file descriptor `fd` of this process, a memfd named `name`.

    base: address of the first byte in this process. length: in bytes.
    """

    fd: int
    name: str
    base: int
    length: int


class HostMemory:
    """A piece of memory cut into tensors.

    Shareable memory is a memfd rather than a file in /dev/shm: no name of it can stay behind or collide, and the kernel
    frees it with the last process that maps it, however that process ends.
    """

    def __init__(
        self, num_bytes: int, shareable: bool, cpus: Collection[int] | None = None, populated: bool = True
    ) -> None:
        """cpus: processors near which the memory should lie. populated: have the machine give all pages at once, not
        at their first use. Raises StartupError if it does not have them.
        """
        self._length = max(mmap.PAGESIZE, page_aligned(num_bytes))
        self._name = f"hisparse-pd-{secrets.token_hex(16)}"
        self._fd = -1
        if shareable:
            self._fd = os.memfd_create(self._name)
            os.ftruncate(self._fd, self._length)
            self._memory = mmap.mmap(self._fd, self._length)
        else:
            # Private, since Linux gives shared memory large pages only where an administrator wants it to.
            self._memory = mmap.mmap(-1, self._length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Pinned pages of private memory would be copied for a child process at once, all of them.
            self._memory.madvise(mmap.MADV_DONTFORK)
        # Scattered items in 4 KiB pages spend as long on address translation as on copying.
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if populated:
            populate(self._address, self._length, cpus)

    def tensor(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A uint8 tensor `offset` bytes into the memory, which it keeps alive."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=offset).view(shape)

    def shared(self) -> SharedRegion | None:
        """How another process maps it, or None if it is not shareable or was closed."""
        if self._fd < 0:
            return None
        return SharedRegion(self._fd, self._name, self._address, self._length)

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> None:
        """Let no other process map it any more. Its last tensor and its last mapping free the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def page_aligned(num_bytes: int) -> int:
    """The next offset at which a memory page begins."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
