"""Offering a host pool to prefill nodes."""

import os

from control.messages import BufferInfo, Destination, ModelIdentity, SharedMemory
from hisparse.host_pool import HostKVPool
from transfer.routes import Transports


def buffers_of(host: HostKVPool) -> BufferInfo:
    """The pool's buffers, to be registered with transports."""
    ptrs, lengths, item_lengths = host.get_contiguous_buf_infos()
    return BufferInfo(ptrs=tuple(ptrs), lengths=tuple(lengths), item_lengths=tuple(item_lengths))


def destination_of(host: HostKVPool, transports: Transports, identity: ModelIdentity) -> Destination:
    """What prefill nodes need to know to write into the pool, whose buffers are registered with the transports.

    A pool that is shareable is offered to be mapped, too: by this process's number and the memory's own name.
    """
    region = host.shared()
    shared = None
    if region is not None:
        shared = SharedMemory(pid=os.getpid(), fd=region.fd, name=region.name, base=region.base, length=region.length)
    return Destination(identity=identity, buffers=buffers_of(host), sessions=transports.sessions, shared=shared)
