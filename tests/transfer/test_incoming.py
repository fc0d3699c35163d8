"""A cut is passed when no connection from before can bring a byte any more."""

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from transfer.incoming import IncomingCut


class Listening:
    """A port, and connections to it, of this process."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))

    def accept(self) -> socket.socket:
        return self.listener.accept()[0]


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening()
    with made.listener:
        yield made


def test_a_connection_is_cut_when_what_it_brought_has_been_read_and_it_is_closed(listening: Listening) -> None:
    with listening.connect() as client, listening.accept() as server:
        client.sendall(b"before")
        cut = IncomingCut([listening.port])
        assert not cut.passed()
        assert server.recv(100) == b"before"
        assert server.recv(100) == b"", "its reader takes that for the end"
        assert not cut.passed()
        server.close()
        assert cut.passed()


def test_what_is_sent_after_a_cut_is_refused(listening: Listening) -> None:
    with listening.connect() as client, listening.accept() as server:
        IncomingCut([listening.port]).passed()
        client.sendall(b"after")
        with pytest.raises(ConnectionResetError):
            server.recv(100)


def test_a_connection_that_nobody_has_accepted_yet_holds_a_cut_up(listening: Listening) -> None:
    """It may have brought bytes already, and whoever accepts it reads them."""
    with listening.connect() as client:
        client.sendall(b"before")
        cut = IncomingCut([listening.port])
        assert not cut.passed()
        with listening.accept() as server:
            assert not cut.passed()
            assert server.recv(100) == b"before"
            assert server.recv(100) == b""
        assert cut.passed()


def test_bytes_of_a_connection_that_was_reset_hold_a_cut_up_until_they_are_read(listening: Listening) -> None:
    """The kernel has forgotten that connection, but not what it brought."""
    client = listening.connect()
    with listening.accept() as server:
        client.sendall(b"before")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        cut = IncomingCut([listening.port])
        assert not cut.passed()
        assert server.recv(100) == b"before"
        assert not cut.passed()
    assert cut.passed()


def test_connections_that_come_later_are_let_be(listening: Listening) -> None:
    cut = IncomingCut([listening.port])
    assert cut.passed()
    with listening.connect() as client, listening.accept() as server:
        assert cut.passed()
        client.sendall(b"new")
        assert server.recv(100) == b"new"


def test_other_connections_of_the_process_are_let_be(listening: Listening) -> None:
    other = Listening()
    with other.listener, other.connect() as client, other.accept() as server:
        assert IncomingCut([listening.port]).passed()
        client.sendall(b"x")
        assert server.recv(100) == b"x"


def test_a_cut_leaves_no_descriptor_behind(listening: Listening) -> None:
    with listening.connect(), listening.accept():
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            IncomingCut([listening.port]).passed()
        assert len(os.listdir("/proc/self/fd")) == before


def test_without_ports_there_is_nothing_to_cut() -> None:
    assert IncomingCut([]).passed()
