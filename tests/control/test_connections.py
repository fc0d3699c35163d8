"""When a connection to a mailbox is made anew."""

import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from control import connections
from control.access import Access
from control.connections import Connections


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A peer that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.3)
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
    monkeypatch.setattr(connections, "DEAF_S", 0.3)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    accepted = []
    for _ in range(3):
        time.sleep(0.4)
        made.post(address, b"frame", heard=None if silent else time.monotonic())
        try:
            accepted.append(listener.accept()[0])
        except TimeoutError:
            assert not silent
    assert len(accepted) == (3 if silent else 1)
    for connection in accepted:
        connection.close()
