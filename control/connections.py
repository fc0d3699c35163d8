"""The connections to other processes' mailboxes: one per address, made when it is first written to."""

import time
from dataclasses import dataclass

import zmq

from control.access import Access

MAX_QUEUED = 1000
"""Frames that wait for one peer. Those beyond are dropped and counted: what must arrive is repeated."""
IDLE_CLOSE_S = 60.0
STUCK_S = 2.0
"""A connection that took nothing for this long is replaced. ZeroMQ gives a connection up for good if the other side
breaks its protocol, for example by expecting keys where none are shown."""
DEAF_S = 10.0
"""A connection to a peer that was not heard for this long is replaced. If the other side ends while it breaks the
protocol, ZeroMQ may give the connection up and still take frames for it, until MAX_QUEUED of them wait."""
_UNACKNOWLEDGED_MS = 3000
"""A connection without acknowledgements for this long is replaced. TCP doubles its pauses: after a partition it would
take as long again as the partition lasted."""
_CONNECT_MS = 2000


@dataclass
class _Connection:
    socket: "zmq.Socket[bytes]"
    made: float
    last_used: float
    """When it last took a frame (time.monotonic, as `made`)."""


class Connections:
    """One connection per address. The control thread owns them."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", access: Access) -> None:
        self._context = context
        self._access = access
        self._by_address: dict[str, _Connection] = {}

    def post(self, address: str, frame: bytes, heard: float | None) -> None:
        """Queue a frame. heard: when its address last was. Raises zmq.ZMQError if it cannot be queued."""
        now = time.monotonic()
        connection = self._by_address.get(address)
        if connection is not None and now - max(connection.made, heard or 0.0) > DEAF_S:
            self._close(address)
            connection = None
        if connection is None:
            self._close_idle(now)
            connection = self._by_address[address] = _Connection(self._connect(address), now, now)
        try:
            connection.socket.send(frame, zmq.NOBLOCK)
            connection.last_used = now
        except zmq.Again:
            if now - connection.last_used > STUCK_S:
                self._close(address)
            raise

    def close(self) -> None:
        """Close all. Queued frames are sent if that takes at most 200 ms."""
        for address in list(self._by_address):
            self._close(address)

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
        self._access.set_curve_keys(socket)
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
