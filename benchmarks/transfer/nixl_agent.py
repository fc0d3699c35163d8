"""NIXL over UCX, where its package is installed: the peer that this project is compared with.

An agent's progress thread keeps a core busy as long as the agent lives, so agents live only while NIXL is measured.
"""

import importlib.util
import os
import time
from typing import Any

import numpy as np

from benchmarks.transfer.methods import MethodFailed
from transfer.memory import BufferInfo
from transfer.planner import Descriptors

UCX_TLS = {"tcp": "tcp", "rdma": "ib,tcp", "shm": "tcp,posix,sysv,cma,self"}
"""What UCX may use for each protocol. Beside shared memory it wants a transport that notices a dead peer."""

_POLL_S = 0.0002


def is_installed() -> bool:
    """Whether the extra `nixl` is installed here."""
    return importlib.util.find_spec("nixl") is not None


class Agent:
    """A NIXL agent with the UCX backend. Raises MethodFailed if it does not start."""

    def __init__(self, name: str, ucx_tls: str) -> None:
        os.environ["UCX_TLS"] = ucx_tls
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        except Exception as error:
            raise MethodFailed(f"NIXL did not start with UCX_TLS={ucx_tls}: {error!r}") from error
        self._registered: list[Any] = []
        self._peer = ""

    @property
    def metadata(self) -> bytes:
        """What an initiator needs to write to the registered memory."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, buffers: BufferInfo) -> None:
        regions = [(ptr, length, 0, "") for ptr, length in zip(buffers.ptrs, buffers.lengths, strict=True)]
        self._registered.append(self._agent.register_memory(regions, "DRAM"))

    def connect(self, metadata: bytes) -> None:
        """Write to that agent from now on."""
        peer = self._agent.add_remote_agent(metadata)
        self._peer = peer.decode() if isinstance(peer, bytes) else peer

    def write(self, batch: Descriptors) -> None:
        """Write everything in one transfer request. Raises MethodFailed."""
        device = np.zeros(len(batch.lengths), dtype=np.int64)
        local = self._agent.get_xfer_descs(np.column_stack([batch.sources, batch.lengths, device]), "DRAM")
        remote = self._agent.get_xfer_descs(np.column_stack([batch.destinations, batch.lengths, device]), "DRAM")
        handle = self._agent.initialize_xfer("WRITE", local, remote, self._peer)
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise MethodFailed(f"NIXL ended a transfer in state {state}")

    def disconnect(self) -> None:
        """Forget the peer, before it ends."""
        self._agent.remove_remote_agent(self._peer)

    def close(self) -> None:
        """End the agent with its threads."""
        for registration in self._registered:
            self._agent.deregister_memory(registration)
        del self._agent
