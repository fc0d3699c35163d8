"""What every transport states about itself, and its end in a process. Implementations: `shm`, `engine`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from transfer.choices import Transport
from transfer.memory import BufferInfo, RemotePool, Session
from transfer.writer import Channel

Packing = Literal["never", "where it pays", "always"]
"""When a chunk is packed into send buffers before it is sent. `where it pays`: if that halves the descriptors."""


class Unreachable(Exception):
    """The transport exists at both ends, but does not connect them."""


class TransferEndpoint(Protocol):
    """A transport's end in this process. Defaults: it registers no memory and listens on no port."""

    sessions: tuple[Session, ...] = ()
    """Addresses at which other processes write to this one."""
    ports: tuple[int, ...] = ()
    fenced_ports: tuple[int, ...] = ()
    """Ports through which bytes of a failed write may still come in. A fence cuts their connections."""

    def register(self, buffers: BufferInfo) -> None:
        """Let other processes access these buffers, and channels send from them. Raises StartupError."""
        return

    def unregister(self, buffers: BufferInfo) -> None:
        """Undo `register`."""
        return

    def connect(self, pool: RemotePool, reading: bool) -> Channel | None:
        """A channel that writes to the pool, or reads it. None if the pool does not offer this transport.

        Raises Unreachable.
        """
        ...


@dataclass(frozen=True)
class TransportKind:
    """A transport. Descriptor limits are the channel's (`transfer.writer.Channel`).

    start: the endpoint of a process from (host, RDMA devices). bytes_per_second: expected of reads, verification
    included, until one was measured. pack_host, pack_device: packing of sources in host and in device memory.
    unavailable: why this machine cannot offer it, or None, from the RDMA devices asked for.
    """

    name: Transport
    start: Callable[[str, str], TransferEndpoint]
    bytes_per_second: float
    pack_host: Packing
    pack_device: Packing
    unavailable: Callable[[str], str | None] = lambda devices: None
    needs_engine: bool = False
    """Whether the endpoint is an engine, which takes a pair of ports."""
    shares_memory: bool = False
    """Whether the pool has to be in memory that other processes can map."""
