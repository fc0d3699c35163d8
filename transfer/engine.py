"""Mooncake, as this project needs it: an engine of one transport that registers memory and writes to others.

Mooncake ignores the protocol that it is given: it takes RDMA where it finds devices and TCP where it does not, in
silence. So the choice is made here, before it starts.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from service.errors import StartupError
from transfer.messages import BufferInfo, Session, Transport
from transfer.planner import Descriptors
from transfer.ports import listening_ports

log = structlog.get_logger(__name__)

_INFINIBAND = Path("/sys/class/infiniband")
_DONE, _FAILED = 1, -1
_MAX_BATCH = 32
"""Descriptors per batch. Some 100 in flight keep the TCP transport busy; it refuses 2000 outright."""
_POLL_S = 0.0005


def rdma_devices(wanted: str = "") -> list[str]:
    """The RDMA devices of this machine. Raises StartupError if one of `wanted` (comma-separated) is not there."""
    devices = sorted(p.name for p in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    missing = set(filter(None, wanted.split(","))) - set(devices)
    if devices and missing:
        raise StartupError(f"--ib-device {','.join(sorted(missing))} not found; this machine has {', '.join(devices)}")
    return devices


class KVTransferEngine:
    """Registers local buffers and writes into those of other processes.

    `session` names this engine to others, and `ports` are those that it listens on, at every address of the machine.
    Channels may be used at the same time by different threads.
    Raises StartupError if Mooncake is missing or does not start.
    """

    def __init__(self, host: str, transport: Literal["rdma", "tcp"], ib_device: str = "") -> None:
        if transport == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"
        else:
            os.environ.pop("MC_FORCE_TCP", None)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise StartupError(
                f"cannot load Mooncake ({error}); install hisparse-pd[cpu], [cuda12] or [cuda13] and libibverbs1"
            ) from error
        self._engine = TransferEngine()
        before = listening_ports()
        if self._engine.initialize(host, "P2PHANDSHAKE", transport, ib_device) != 0:
            raise StartupError(f"Mooncake did not start on {host} with {transport}; is the address this host's?")
        self.session = Session(transport=transport, name=f"{host}:{self._engine.get_rpc_port()}")
        self.ports = tuple(sorted(listening_ports() - before))

    def register(self, buffers: BufferInfo) -> None:
        """Let these buffers be written to and from. Raises StartupError if the engine refuses one."""
        for ptr, length in zip(buffers.ptrs, buffers.lengths, strict=True):
            if length and self._engine.register_memory(ptr, length) != 0:
                raise StartupError(f"Mooncake did not register {length} bytes; check `ulimit -l` for RDMA")

    def unregister(self, buffers: BufferInfo) -> None:
        """Undo `register`."""
        for ptr, length in zip(buffers.ptrs, buffers.lengths, strict=True):
            if length and self._engine.unregister_memory(ptr) != 0:
                log.warning("Mooncake did not unregister a buffer", bytes=length)

    def channel(self, session: Session) -> "MooncakeChannel":
        """The way to another engine of the same transport. Connects with the first write."""
        return MooncakeChannel(self._engine, session)


class MooncakeChannel:
    """Writes to one session, each descriptor submitted and polled on its own.

    A batch call that fails proves nothing about its other descriptors, which land later; and Mooncake's synchronous
    calls, and its batch status, spin on a core that the model could use: they took 1.4 times as long on two cores.
    """

    max_batch = _MAX_BATCH

    def __init__(self, engine: Any, session: Session) -> None:
        self.transport: Transport = session.transport
        self._engine = engine
        self._name = session.name

    def submit(self, batch: Descriptors) -> "_Posted":
        handles: list[int] = []
        for source, destination, length in zip(*(column.tolist() for column in batch), strict=True):
            handle = self._engine.transfer_submit_write(self._name, source, destination, length)
            if handle <= 0:
                # It cannot be reached or refuses: what follows would fare no better.
                return _Posted(self._engine, handles, refused=1)
            handles.append(handle)
        return _Posted(self._engine, handles)

    def check(self) -> None:
        """Nothing to see: a write that ended well was acknowledged by the process that took it."""

    def close(self) -> None:
        """Nothing to give back: Mooncake keeps its own connections."""


@dataclass
class _Posted:
    engine: Any
    handles: list[int]
    refused: int = 0

    def wait(self) -> int:
        return self.refused + sum(self._await(handle) for handle in self.handles)

    def _await(self, handle: int) -> bool:
        """Poll one descriptor to its end; whether it failed. Other states, a timeout included, are no end."""
        while (status := self.engine.transfer_check_status(handle)) not in (_DONE, _FAILED):
            time.sleep(_POLL_S)
        return bool(status == _FAILED)
