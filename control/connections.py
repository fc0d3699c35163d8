"""The connections to other processes' mailboxes: one for each address, made when it is first written to."""

import time
from dataclasses import dataclass

import zmq

from control.access import Access

MAX_QUEUED = 1000
"""Frames that wait for one peer; those beyond are dropped and counted. What must arrive is repeated anyway."""
IDLE_CLOSE_S = 60.0
STUCK_S = 2.0
"""A connection that took nothing for so long is made anew with the next frame: ZeroMQ gives one up for good when the
other side breaks its protocol, as a process does that expects keys and is shown none."""
_UNACKNOWLEDGED_MS = 3000
"""A connection on which nothing arrives for so long is made anew: TCP waits longer before each further attempt, and
after a partition it would take up to as long again as that has lasted."""
_CONNECT_MS = 2000


@dataclass
class _Connection:
    socket: "zmq.Socket[bytes]"
    last_used: float
    """When it last took a frame (time.monotonic)."""


class Connections:
    """By address. The control thread owns them."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", access: Access) -> None:
        self._context = context
        self._access = access
        self._by_address: dict[str, _Connection] = {}

    @property
    def addresses(self) -> list[str]:
        return list(self._by_address)

    def post(self, address: str, frame: bytes) -> None:
        """Queue a frame. Raises zmq.ZMQError if the queue is full or nothing can be connected to the address."""
        now = time.monotonic()
        connection = self._by_address.get(address)
        if connection is None:
            self._close_idle(now)
            connection = self._by_address[address] = _Connection(self._connect(address), now)
        try:
            connection.socket.send(frame, zmq.NOBLOCK)
            connection.last_used = now
        except zmq.Again:
            if now - connection.last_used > STUCK_S:
                self._close(address)
            raise

    def close(self) -> None:
        """Close all; what is queued is sent if that takes but a moment."""
        for address in self.addresses:
            self._close(address)

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
        self._access.introduce(socket)
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _close_idle(self, now: float) -> None:
        for address, connection in list(self._by_address.items()):
            if now - connection.last_used > IDLE_CLOSE_S:
                self._close(address)

    def _close(self, address: str) -> None:
        self._by_address.pop(address).socket.close()
