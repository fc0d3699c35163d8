"""Mooncake, as this project needs it: one engine of one transport that writes batches and knows when they ended.

Mooncake ignores the protocol that it is given: it takes RDMA where it finds devices and TCP where it does not, in
silence. So the choice is made here, before it starts.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import structlog

from service.errors import StartupError
from transfer.messages import BufferInfo
from transfer.planner import Descriptors

log = structlog.get_logger(__name__)

Protocol = Literal["rdma", "tcp"]

_INFINIBAND = Path("/sys/class/infiniband")
_DONE, _FAILED = 1, -1
_WINDOW = 256
"""Descriptors in flight. The TCP transport refuses a batch outright above some 2000."""
_POLL_S = 0.0002


class TransferError(Exception):
    """Some descriptors of a write failed. None of the write is in flight any more."""


class TransferAborted(Exception):
    """A write was given up on request. None of it is in flight any more."""


def choose_protocol(wanted: Literal["auto", "rdma", "tcp"], ib_device: str) -> Protocol:
    """The transport to start. `auto` is RDMA where there is a device and TCP elsewhere.

    Raises StartupError for `rdma` without a device, or with devices that do not exist.
    """
    devices = sorted(p.name for p in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    if wanted == "tcp" or (wanted == "auto" and not devices):
        return "tcp"
    if not devices:
        raise StartupError(
            f"--transfer-protocol rdma: no RDMA device under {_INFINIBAND}; use --transfer-protocol tcp or auto"
        )
    missing = set(filter(None, ib_device.split(","))) - set(devices)
    if missing:
        raise StartupError(f"--ib-device {','.join(sorted(missing))} not found; this machine has {', '.join(devices)}")
    return "rdma"


class KVTransferEngine:
    """Registers local buffers and writes into those of other processes.

    `session` names this engine to others. `write` may be called from several threads at once, for different sessions.
    Raises StartupError if Mooncake is missing or does not start.
    """

    def __init__(self, host: str, protocol: Protocol, ib_device: str = "") -> None:
        if protocol == "tcp":
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
        self.protocol = protocol
        self._engine = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, ib_device) != 0:
            raise StartupError(
                f"Mooncake did not start on {host} with protocol {protocol}; is the address this host's?"
            )
        self.session = f"{host}:{self._engine.get_rpc_port()}"

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

    def write(self, session: str, batch: Descriptors, go_on: Callable[[], bool] = lambda: True) -> None:
        """Write all descriptors into the session's registered buffers and return when the last has landed.

        Each descriptor is polled to a terminal state, also after an error or when `go_on` turns false, so that when
        this returns or raises nothing of it is in flight (a failed batch call would prove nothing: its other
        descriptors land later). Raises TransferError or TransferAborted.
        """
        posted: deque[int] = deque()
        failed = 0
        try:
            for source, destination, length in np.column_stack(batch).tolist():
                if failed or not go_on():
                    break
                if len(posted) == _WINDOW:
                    failed += self._await(posted.popleft())
                handle = self._engine.transfer_submit_write(session, source, destination, length)
                if handle <= 0:
                    raise TransferError(f"{session} cannot be reached or refused the write")
                posted.append(handle)
        finally:
            failed += sum(self._await(handle) for handle in posted)
        if failed:
            raise TransferError(f"{failed} of the descriptors written to {session} failed")
        if not go_on():
            raise TransferAborted(session)

    def _await(self, handle: int) -> bool:
        """Poll one descriptor to its end; whether it failed.

        Sleeps between polls: Mooncake's synchronous calls spin on a core that the model could use.
        """
        while (status := self._engine.transfer_check_status(handle)) not in (_DONE, _FAILED):
            time.sleep(_POLL_S)
        return bool(status == _FAILED)
