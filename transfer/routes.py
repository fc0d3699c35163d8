"""The transports of a process, and which of them carries KV to a decode node."""

from collections.abc import Callable, Sequence
from typing import Literal

import structlog

from base.errors import StartupError
from transfer.choices import TransferProtocol
from transfer.engine import KVTransferEngine, rdma_devices
from transfer.incoming import IncomingCut
from transfer.memory import BufferInfo, RemotePool, Session, SharedMemory, Transport
from transfer.ports import ClaimedPorts
from transfer.writer import Channel

log = structlog.get_logger(__name__)


class NoRoute(Exception):
    """No transport reaches the decode node from here."""


def choose_transports(wanted: TransferProtocol, ib_device: str) -> tuple[Transport, ...]:
    """The transports that a process offers, best first. `auto`: all that this machine has.

    Raises StartupError for `rdma` without a device, where Mooncake would silently take TCP.
    """
    devices = rdma_devices(ib_device) if wanted in ("auto", "rdma") else []
    if wanted == "auto":
        return ("shm", "rdma", "tcp") if devices else ("shm", "tcp")
    if wanted == "rdma" and not devices:
        raise StartupError(
            "--transfer-protocol rdma: no RDMA device under /sys/class/infiniband; use --transfer-protocol tcp or auto"
        )
    return (wanted,)


def engines_among(transports: Sequence[Transport]) -> list[Literal["rdma", "tcp"]]:
    """The transports that need an engine."""
    return [transport for transport in transports if transport != "shm"]


class Transports:
    """The transports of one process. A decode node offers them, a prefill node connects with them."""

    def __init__(
        self, host: str, wanted: TransferProtocol, ib_device: str = "", ports: ClaimedPorts | None = None
    ) -> None:
        """host: the address that others write to. ports: the engines' ports, or None for any.

        Raises StartupError if an engine does not start.
        """
        self.offered = choose_transports(wanted, ib_device)
        self.engines: dict[Transport, KVTransferEngine] = {}
        for number, transport in enumerate(engines_among(self.offered)):
            if ports is not None:
                ports.release(number)
            self.engines[transport] = KVTransferEngine(host, transport, ib_device if transport == "rdma" else "")
        if ports is not None:
            ports.check(self.ports)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of the engines. Whoever reaches them can write to what is registered."""
        return tuple(port for engine in self.engines.values() for port in engine.ports)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """By which others write to the buffers that are registered here."""
        return tuple(engine.session for engine in self.engines.values())

    def register(self, buffers: BufferInfo) -> None:
        """Let these buffers be written to and from with every engine."""
        for engine in self.engines.values():
            engine.register(buffers)

    def unregister(self, buffers: BufferInfo) -> None:
        for engine in self.engines.values():
            engine.unregister(buffers)

    def cut(self) -> IncomingCut:
        """A fence behind everything that others have posted to this process.

        Only TCP needs one: shared memory is written by processors, and a NIC that reports a failure writes no more.
        """
        engine = self.engines.get("tcp")
        return IncomingCut(() if engine is None else engine.data_ports)

    def connect(self, destination: RemotePool) -> Channel:
        """The best way to a decode node. Raises NoRoute, with what was tried."""
        # Imported here, since the import compiles copies, which a decode node does not need.
        from transfer.shm import SharedMemoryChannel

        return self._route(destination, SharedMemoryChannel, KVTransferEngine.channel)

    def connect_to_read(self, destination: RemotePool) -> Channel:
        """The best way to read a decode node's pool (`transfer.reader`). Raises NoRoute, with what was tried."""
        from transfer.shm import SharedMemoryReads

        return self._route(destination, SharedMemoryReads, KVTransferEngine.reading_channel)

    def _route(
        self,
        destination: RemotePool,
        shared: Callable[[SharedMemory], Channel],
        over_engine: Callable[[KVTransferEngine, Session], Channel],
    ) -> Channel:
        from transfer.shm import NotShared

        tried = []
        for transport in self.offered:
            if transport == "shm" and destination.shared is not None:
                try:
                    return shared(destination.shared)
                except NotShared as error:
                    tried.append(f"shm: {error}")
            for session in destination.sessions:
                if session.transport == transport:
                    return over_engine(self.engines[session.transport], session)
        here, there = "|".join(self.offered), "|".join(destination.transports)
        raise NoRoute(f"no route: {here} here, {there} at the decode node" + "".join(f"; {why}" for why in tried))
