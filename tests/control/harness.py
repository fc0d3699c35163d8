"""Mailboxes on the loopback interface, and what strangers do to them."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import zmq

from control.keys import KeyPair, Keys, load_keys
from control.messages import Cancel, Message, Peer, Role
from control.plane import ControlPlane
from tests.e2e.cluster import wait_until


class Mailbox(NamedTuple):
    plane: ControlPlane
    inbox: "queue.SimpleQueue[tuple[Peer, Message]]"

    @property
    def me(self) -> Peer:
        return self.plane.me

    @property
    def port(self) -> int:
        return int(self.me.address.rpartition(":")[2])

    def take(self) -> tuple[Peer, Message]:
        return self.inbox.get(timeout=10)

    def wait_refused(self, reason: str, number: int = 1) -> None:
        wait_until(lambda: self.plane.refused[reason] >= number, what=f"{number} refused for {reason}")


Start = Callable[..., Mailbox]


@contextmanager
def mailboxes(key_directory: Path | None = None) -> Iterator[Start]:
    """A function that starts a mailbox on the loopback interface, with the keys of its role if there are keys."""
    planes: list[ControlPlane] = []

    def start(role: Role = "gateway", keys: Keys | None = None, port: int = 0, encrypted: bool = True) -> Mailbox:
        inbox: queue.SimpleQueue[tuple[Peer, Message]] = queue.SimpleQueue()
        if encrypted and keys is None and key_directory is not None:
            keys = load_keys(key_directory, role)
        plane = ControlPlane(role, "127.0.0.1", port, "127.0.0.1", lambda *item: inbox.put(item), keys)
        planes.append(plane)
        plane.start()
        return Mailbox(plane, inbox)

    yield start
    for plane in planes:
        plane.stop()


class Stranger:
    """A PUSH socket that connects to a mailbox with the keys it is given, or none."""

    def __init__(self, to: Mailbox | ControlPlane, own: KeyPair | None = None, cluster: str | None = None) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PUSH)
        self.socket.setsockopt(zmq.LINGER, 0)
        if own is not None and cluster is not None:
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, cluster.encode())
        self.socket.connect(f"tcp://{to.me.address}")

    def send(self, data: bytes) -> None:
        self.socket.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()


def new_pair() -> KeyPair:
    return KeyPair(*(half.decode() for half in zmq.curve_keypair()))


def assert_serves(sender: Mailbox, receiver: Mailbox) -> None:
    """The next message to arrive is one of the legitimate sender's."""
    sender.plane.send(receiver.me, Cancel(request_id="legitimate"))
    assert receiver.take() == (sender.me, Cancel(request_id="legitimate"))
