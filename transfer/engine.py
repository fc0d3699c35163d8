"""RDMA and TCP: Mooncake engines of one transport each.

Mooncake ignores the protocol argument: it takes RDMA if it finds devices, else TCP. `_start` makes the choice.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from base.errors import StartupError
from transfer.choices import EngineTransport, Transport
from transfer.memory import BufferInfo, RemotePool, Session
from transfer.planner import NO_LIMIT, Descriptors
from transfer.ports import listening_ports
from transfer.transport import TransferEndpoint, TransportKind
from transfer.writer import Channel, Outcome, Pending

log = structlog.get_logger(__name__)

_INFINIBAND = Path("/sys/class/infiniband")
_DONE, _FAILED = 1, -1
_MAX_BATCH = 32
"""Descriptors. Some 100 in flight keep the TCP transport busy; it refuses 2000."""
_TCP_CONNECTIONS = 16
"""To a peer: Mooncake's maximum. Each carries one descriptor at a time, until it is acknowledged."""
_TCP_DESCRIPTOR_BYTES = 1 << 20
"""Maximum, so that a layer of a chunk uses several connections."""
_POLL_S = 0.0005
_DEADLINES = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")
"""Seconds of silence after which Mooncake closes a connection and fails its writes. The kernel goes on delivering."""
_DEADLINE_S = 30


def rdma_devices(wanted: str = "") -> list[str]:
    """The RDMA devices of this machine. Raises StartupError if one of `wanted` (comma-separated) is not there."""
    devices = sorted(p.name for p in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    missing = set(filter(None, wanted.split(","))) - set(devices)
    if devices and missing:
        raise StartupError(f"--ib-device {','.join(sorted(missing))} not found; this machine has {', '.join(devices)}")
    return devices


def load_mooncake() -> Any:
    """`mooncake.engine.TransferEngine`. Raises StartupError if it cannot be loaded."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise StartupError(
            f"cannot load Mooncake ({error}); install hisparse-pd[cpu] or [cuda13], libibverbs1 and ibverbs-providers"
        ) from error
    return TransferEngine


def _start(host: str, transport: EngineTransport, ib_device: str) -> Any:
    """A started `mooncake.engine.TransferEngine`. Settings in the environment take precedence."""
    if transport == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    else:
        os.environ.pop("MC_FORCE_TCP", None)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TCP_LANES_PER_PEER", str(_TCP_CONNECTIONS))
    engine = load_mooncake()()
    log.info(
        "Mooncake starts; of its own lines these mean nothing",
        lines="Logging before InitGoogleLogging() | Local segment descriptor not found",
    )
    if engine.initialize(host, "P2PHANDSHAKE", transport, ib_device) != 0:
        raise StartupError(f"Mooncake did not start on {host} with {transport}; is the address this host's?")
    return engine


class KVTransferEngine(TransferEndpoint):
    """An engine, which listens at every address of the machine. Threads may use different channels concurrently.

    session: the engine's name to others. Raises StartupError if Mooncake is missing or does not start.
    """

    def __init__(self, host: str, transport: EngineTransport, ib_device: str = "") -> None:
        before = listening_ports()
        self.mooncake = _start(host, transport, ib_device)
        self.session = Session(transport=transport, name=f"{host}:{self.mooncake.get_rpc_port()}")
        self.sessions = (self.session,)
        self.ports = tuple(sorted(listening_ports() - before))
        # A NIC that reports a failure writes no more.
        if transport == "tcp":
            self.fenced_ports = tuple(port for port in self.ports if port != self.mooncake.get_rpc_port())
            if not self.fenced_ports:
                raise StartupError(
                    f"Mooncake takes data on no port of its own (it has {self.ports}): late writes could not be cut off"
                )
        self._patience_s = min(_seconds(os.environ.get(name, "")) for name in _DEADLINES)

    def register(self, buffers: BufferInfo) -> None:
        for ptr, length in zip(buffers.ptrs, buffers.lengths, strict=True):
            if length and self.mooncake.register_memory(ptr, length) != 0:
                raise StartupError(f"Mooncake did not register {length} bytes; check `ulimit -l` for RDMA")

    def unregister(self, buffers: BufferInfo) -> None:
        for ptr, length in zip(buffers.ptrs, buffers.lengths, strict=True):
            if length and self.mooncake.unregister_memory(ptr) != 0:
                log.warning("Mooncake did not unregister a buffer", bytes=length)

    def connect(self, pool: RemotePool, reading: bool) -> "MooncakeChannel | None":
        """The channel connects to the other engine with its first descriptor."""
        for session in pool.sessions:
            if session.transport == self.session.transport:
                return self.channel(session, reading)
        return None

    def channel(self, session: Session, reading: bool = False) -> "MooncakeChannel":
        """A channel to another engine of the same transport."""
        return MooncakeChannel(self.mooncake, session, self._patience_s, reading)


class MooncakeChannel(Channel):
    """Writes to one session, or reads from it (`reading`). Each descriptor is submitted and polled on its own.

    A failed batch call proves nothing about its other descriptors, which may land later. Mooncake's synchronous calls
    and its batch status also spin on a core: they took 1.4 times as long on two cores.

    Mooncake has no call for a single read, so each is a list of one. The handler of a read's last socket operation sets
    the final status, so nothing lands afterwards. Mooncake's other read calls free lists of which something may land.
    """

    max_batch = _MAX_BATCH
    attempts = 1 + _TCP_CONNECTIONS
    """One more per connection: a closed connection shows when it is used."""

    def __init__(self, engine: Any, session: Session, patience_s: float, reading: bool) -> None:
        """patience_s: Mooncake does not give a write up earlier."""
        self.transport: Transport = session.transport
        self.max_bytes = _TCP_DESCRIPTOR_BYTES if session.transport == "tcp" else NO_LIMIT
        self._engine = engine
        self._name = session.name
        self._patience_s = patience_s
        self._reading = reading

    def submit(self, batch: Descriptors) -> Pending:
        posted = _Posted(self._engine, given_up_after=time.monotonic() + self._patience_s)
        for source, destination, length in zip(*(column.tolist() for column in batch), strict=True):
            handle = self._submit_one(source, destination, length)
            if handle <= 0:
                # The peer cannot be reached or refuses. The rest would fail, too.
                posted.refused = True
                break
            posted.handles.append(handle)
        return posted.wait

    def _submit_one(self, source: int, destination: int, length: int) -> int:
        """A handle to poll; at most 0 if it was refused."""
        if self._reading:
            return int(self._engine.batch_transfer_async_read(self._name, [destination], [source], [length]))
        return int(self._engine.transfer_submit_write(self._name, source, destination, length))


@dataclass
class _Posted:
    """given_up_after: a failure before that time (time.monotonic) means that the connection was closed."""

    engine: Any
    given_up_after: float
    handles: list[int] = field(default_factory=list)
    refused: bool = False

    def wait(self) -> Outcome:
        failed = [handle for handle in self.handles if self._await(handle) == _FAILED]
        if failed:
            # Mooncake has one code for all failures. Only time tells them apart.
            return Outcome.CUT if time.monotonic() < self.given_up_after else Outcome.GIVEN_UP
        return Outcome.FAILED if self.refused else Outcome.LANDED

    def _await(self, handle: int) -> int:
        """Poll until done or failed. No other state is final, not even a timeout."""
        while (status := int(self.engine.transfer_check_status(handle))) not in (_DONE, _FAILED):
            time.sleep(_POLL_S)
        return status


def _seconds(deadline: str) -> int:
    """The seconds of a deadline; 0 if it is no number, which Mooncake may read otherwise."""
    try:
        return int(deadline or _DEADLINE_S)
    except ValueError:
        return 0


RDMA = TransportKind(
    name="rdma",
    start=lambda host, devices: KVTransferEngine(host, "rdma", devices),
    bytes_per_second=8e9,
    # A NIC reads any memory in place.
    pack_host="never",
    pack_device="never",
    unavailable=lambda devices: None if rdma_devices(devices) else f"no RDMA device under {_INFINIBAND}",
    needs_engine=True,
)
TCP = TransportKind(
    name="tcp",
    start=lambda host, devices: KVTransferEngine(host, "tcp"),
    bytes_per_second=8e8,
    # Each descriptor costs time. A processor reads device memory slowly.
    pack_host="where it pays",
    pack_device="always",
    needs_engine=True,
)
