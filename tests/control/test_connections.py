"""When a connection to a mailbox is made anew, and how failed handshakes are counted."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from control import connections
from control.access import HANDSHAKE_S, Access, Handshakes
from control.connections import Connections


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A peer that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def made() -> Iterator[Connections]:
    with zmq.Context() as context, context.socket(zmq.PULL) as mailbox:
        access = Access(context, mailbox, None)
        connections = Connections(context, access)
        yield connections
        connections.close()
        access.close()


@pytest.mark.parametrize("silent", [True, False])
def test_a_connection_to_a_silent_peer_is_made_anew(
    made: Connections, listener: socket.socket, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ may take frames for a connection that it has given up."""
    now = 0.0
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    accepted = []
    for _ in range(3):
        now += connections.DEAF_S + 1
        made.post(address, b"frame", heard=None if silent else now)
        listener.settimeout(10 if silent or not accepted else 0.3)
        try:
            accepted.append(listener.accept()[0])
        except TimeoutError:
            assert not silent
    assert len(accepted) == (3 if silent else 1)
    for connection in accepted:
        connection.close()


LATER = HANDSHAKE_S + 2


def test_the_count_never_goes_back() -> None:
    """A handshake that was decided early is counted as under way until its time is over."""
    handshakes = Handshakes()
    handshakes.accepted(100.0)
    handshakes.settle(100.0 + LATER)
    handshakes.accepted(100.0 + LATER)
    handshakes.decided()
    handshakes.settle(100.0 + LATER)
    assert handshakes.failed == 1
    handshakes.settle(100.0 + 2 * LATER)
    assert handshakes.failed == 1
