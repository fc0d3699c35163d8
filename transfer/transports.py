"""The registry of transports, the ones that a process offers, and which of them connects it to a decode node."""

from base.errors import StartupError
from transfer.choices import TransferProtocol, Transport
from transfer.engine import RDMA, TCP
from transfer.incoming import IncomingCut
from transfer.memory import BufferInfo, RemotePool, Session
from transfer.ports import ClaimedPorts
from transfer.shm import SHM
from transfer.transport import Packing, TransferEndpoint, TransportKind, Unreachable
from transfer.writer import Channel

TRANSPORTS: dict[Transport, TransportKind] = {kind.name: kind for kind in (SHM, RDMA, TCP)}
"""By name, the best first."""


class NoRoute(Exception):
    """No transport reaches the decode node from here."""


def packing_of(transport: Transport, source_in_host_memory: bool) -> Packing:
    """When chunks are packed that are sent over this transport."""
    kind = TRANSPORTS[transport]
    return kind.pack_host if source_in_host_memory else kind.pack_device


def choose_transports(wanted: TransferProtocol, ib_device: str) -> tuple[Transport, ...]:
    """The transports that a process offers, best first. `auto`: all that this machine has.

    Raises StartupError if the machine does not have the one that is wanted.
    """
    reasons = {name: kind.unavailable(ib_device) for name, kind in TRANSPORTS.items() if wanted in ("auto", name)}
    if wanted != "auto" and (reason := reasons[wanted]) is not None:
        raise StartupError(f"--transfer-protocol {wanted}: {reason}; use another one, or auto")
    return tuple(name for name, reason in reasons.items() if reason is None)


def num_engines(transports: tuple[Transport, ...]) -> int:
    """How many engines a process that offers these transports starts."""
    return sum(TRANSPORTS[transport].needs_engine for transport in transports)


class Transports:
    """The transports of one process. A decode node offers them, a prefill node connects with them."""

    def __init__(
        self, host: str, wanted: TransferProtocol, ib_device: str = "", ports: ClaimedPorts | None = None
    ) -> None:
        """host: the address that other processes write to. ports: of the engines, or None for any.

        Raises StartupError if a transport does not start.
        """
        self.offered = choose_transports(wanted, ib_device)
        self.endpoints: dict[Transport, TransferEndpoint] = {}
        for name in self.offered:
            kind = TRANSPORTS[name]
            if ports is not None and kind.needs_engine:
                ports.release(num_engines(tuple(self.endpoints)))
            self.endpoints[name] = kind.start(host, ib_device)
        if ports is not None:
            ports.check(self.ports)

    @property
    def share_memory(self) -> bool:
        """Whether pools have to be in memory that other processes can map."""
        return any(TRANSPORTS[name].shares_memory for name in self.offered)

    @property
    def ports(self) -> tuple[int, ...]:
        """The listening ports. A process that reaches them can write to the registered buffers."""
        return tuple(port for endpoint in self.endpoints.values() for port in endpoint.ports)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Addresses at which other processes write to the registered buffers."""
        return tuple(session for endpoint in self.endpoints.values() for session in endpoint.sessions)

    def register(self, buffers: BufferInfo) -> None:
        """Let these buffers be written to and from over every transport."""
        for endpoint in self.endpoints.values():
            endpoint.register(buffers)

    def unregister(self, buffers: BufferInfo) -> None:
        for endpoint in self.endpoints.values():
            endpoint.unregister(buffers)

    def cut(self) -> IncomingCut:
        """A fence after everything that other processes have posted to this one."""
        return IncomingCut([port for endpoint in self.endpoints.values() for port in endpoint.fenced_ports])

    def connect(self, destination: RemotePool, reading: bool = False) -> Channel:
        """The best channel that writes to a decode node's pool, or reads it. Raises NoRoute, with what was tried."""
        tried = []
        for name, endpoint in self.endpoints.items():
            try:
                if (channel := endpoint.connect(destination, reading)) is not None:
                    return channel
            except Unreachable as error:
                tried.append(f"; {name}: {error}")
        here, there = "|".join(self.offered), "|".join(destination.transports)
        raise NoRoute(f"no route: {here} here, {there} at the decode node{''.join(tried)}")
