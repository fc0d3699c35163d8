"""Describes the host pool to prefill nodes."""

import os

from control.messages import Destination, ModelIdentity
from kvcache.host_pool import HostKVPool
from transfer.memory import SharedMemory
from transfer.transports import Transports


def destination_of(host: HostKVPool, transports: Transports, identity: ModelIdentity) -> Destination:
    """What a prefill node needs to write into the pool. The caller registers the buffers with the transports.

    Processes of the same host can map a shareable pool instead, by this process's id and the memory's file descriptor.
    """
    region = host.shared()
    shared = None
    if region is not None:
        shared = SharedMemory(pid=os.getpid(), fd=region.fd, name=region.name, base=region.base, length=region.length)
    return Destination(
        identity=identity,
        buffers=host.get_contiguous_buf_infos(),
        sessions=transports.sessions,
        shared=shared,
    )
