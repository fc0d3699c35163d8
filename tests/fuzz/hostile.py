"""Processes with valid keys that send what they want."""

from pathlib import Path
from typing import Any

import zmq

from control.keys import load_keys
from control.messages import (
    Abort,
    Accepted,
    FetchRefused,
    Heartbeat,
    HeartbeatAck,
    Message,
    Outputs,
    Peer,
    PrefillFailed,
    PrefillRequest,
    Quiesced,
    Register,
    Registered,
    Role,
)
from control.plane import ControlPlane

HOSTILE_SALT = "hostile"
"""Of requests that the hostile prefill node may serve: what it says of their KV is nobody else's."""


class Hostile:
    """A gateway or a node with a valid key. It does what is expected of it, and sends any frames besides."""

    def __init__(self, role: Role, keys: Path, to: str) -> None:
        """to: the control address of the node."""
        self.keys = load_keys(keys, role)
        self.plane = ControlPlane(role, "127.0.0.1", 0, "127.0.0.1", self._deliver, self.keys)
        self.me = self.plane.me
        self.attempts: list[list[Any]] = []
        """Those that a decode node has asked this prefill node for."""
        self.offers: dict[str, Peer] = {}
        """By role, the nodes that have registered here."""
        self.served: set[str] = set()
        """Requests whose prompts this prefill node was asked for."""
        self.accepted: set[str] = set()
        self.ended: dict[str, str] = {}
        """Why requests ended, with the error."""
        self.said: set[str] = set()
        """Ids that the node has answered for."""
        self.to = to
        self._socket: zmq.Socket[bytes] | None = None
        self.plane.start()

    def send(self, parts: tuple[bytes, ...]) -> None:
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.PUSH)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.own.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.own.secret.encode())
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self.keys.cluster.public.encode())
            self._socket.connect(f"tcp://{self.to}")
        self._socket.send_multipart(parts)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self.plane.stop()

    def _deliver(self, sender: Peer, message: Message) -> None:
        match message:
            case Register():
                self.offers[sender.role] = sender
                self.plane.send(sender, Registered(via=message.via))
            case Heartbeat():
                self.plane.send(sender, HeartbeatAck(via=message.via, known=True))
            case Accepted():
                self.accepted.add(message.request_id)
            case PrefillRequest():
                if message.cache_salt == HOSTILE_SALT:
                    self.attempts = [*self.attempts[-50:], list(message.attempt)]
                    self.served.add(message.attempt.request_id)
                else:
                    self.plane.send(sender, PrefillFailed(attempt=message.attempt, reason="not here", refused=True))
            case Abort():
                self.plane.send(sender, Quiesced(attempt=message.attempt))
            case FetchRefused() | Quiesced():
                self.said.add(message.attempt.request_id)
            case Outputs():
                for row in message.rows():
                    if row.finish_reason is not None:
                        self.said.add(row.request_id)
                        self.ended[row.request_id] = f"{row.finish_reason}: {row.error}"
            case _:
                pass
