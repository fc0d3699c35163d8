"""A cut is passed when no connection from before can bring a byte any more."""

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.prefill_node.sending import wait_until
from transfer import incoming
from transfer.incoming import CutConnections, IncomingCut


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


def test_a_connection_is_cut_when_it_was_read_and_closed(listening: Listening) -> None:
    with listening.connect() as client, listening.accept() as server:
        client.sendall(b"before")
        cut = CutConnections([listening.port])
        assert not cut.advance()
        assert server.recv(100) == b"before"
        assert server.recv(100) == b"", "its reader takes that for the end"
        assert not cut.advance()
        server.close()
        assert cut.advance()


def test_what_is_sent_after_a_cut_is_refused(listening: Listening) -> None:
    with listening.connect() as client, listening.accept() as server:
        CutConnections([listening.port]).advance()
        client.sendall(b"after")
        with pytest.raises(ConnectionResetError):
            server.recv(100)


def test_a_connection_that_nobody_has_accepted_yet_holds_a_cut_up(listening: Listening) -> None:
    """It may have brought bytes already, and whoever accepts it reads them."""
    with listening.connect() as client:
        client.sendall(b"before")
        cut = CutConnections([listening.port])
        assert not cut.advance()
        with listening.accept() as server:
            assert not cut.advance()
            assert server.recv(100) == b"before"
            assert server.recv(100) == b""
        assert cut.advance()


def test_unread_bytes_of_a_reset_connection_hold_a_cut_up(listening: Listening) -> None:
    """The kernel has forgotten that connection, but not what it brought."""
    client = listening.connect()
    with listening.accept() as server:
        client.sendall(b"before")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        cut = CutConnections([listening.port])
        assert not cut.advance()
        assert server.recv(100) == b"before"
        assert not cut.advance()
    assert cut.advance()


def test_connections_that_come_later_are_let_be(listening: Listening) -> None:
    cut = CutConnections([listening.port])
    assert cut.advance()
    with listening.connect() as client, listening.accept() as server:
        assert cut.advance()
        client.sendall(b"new")
        assert server.recv(100) == b"new"


def test_other_connections_of_the_process_are_let_be(listening: Listening) -> None:
    other = Listening()
    with other.listener, other.connect() as client, other.accept() as server:
        assert CutConnections([listening.port]).advance()
        client.sendall(b"x")
        assert server.recv(100) == b"x"


def test_a_cut_leaves_no_descriptor_behind(listening: Listening) -> None:
    with listening.connect(), listening.accept():
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            CutConnections([listening.port]).advance()
        assert len(os.listdir("/proc/self/fd")) == before


def test_without_ports_there_is_nothing_to_cut() -> None:
    assert IncomingCut([]).passed()


class Scans:
    """Looks at the connections as the cut does, when the test lets it; notes who looked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: set[int] = set()
        self.go_on = threading.Event()
        self.error: OSError | None = None
        self._look = incoming._accepted
        monkeypatch.setattr(incoming, "_accepted", self._accepted)

    @contextmanager
    def _accepted(self, ports: frozenset[int]) -> Iterator[Mapping[int, socket.socket]]:
        self.by.add(threading.get_ident())
        assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        with self._look(ports) as accepted:
            yield accepted


def test_whoever_asks_whether_a_cut_has_passed_never_waits_for_a_scan(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode node's loop asks, and a scan takes long where there are many connections and descriptors."""
    scans = Scans(monkeypatch)
    with listening.connect(), listening.accept() as server:
        cut = IncomingCut([listening.port])
        wait_until(lambda: scans.by)
        assert not cut.passed()
        scans.go_on.set()
        assert server.recv(100) == b""
        assert not cut.passed()
    wait_until(cut.passed)
    assert threading.get_ident() not in scans.by


def test_what_cannot_be_looked_at_is_not_cut(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = CutConnections([listening.port])
    with listening.connect(), listening.accept():
        cut.advance()
        with monkeypatch.context() as without:
            without.setattr(os, "dup", no_descriptor_left)
            with pytest.raises(OSError, match="Too many open files"):
                cut.advance()
        assert not cut.advance()
    assert cut.advance()


def no_descriptor_left(_: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_cut_goes_on_when_it_can_look_again(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "_AFTER_ERROR_S", 0.01)
    scans = Scans(monkeypatch)
    scans.error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    scans.go_on.set()
    cut = IncomingCut([listening.port])
    wait_until(lambda: scans.by)
    assert not cut.passed()
    scans.error = None
    wait_until(cut.passed)
