"""After a cut, nothing lands any more of what was under way, whoever still sends it."""

import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest

from tests.transfer.writing import write
from transfer.engine import KVTransferEngine
from transfer.incoming import IncomingCut
from transfer.messages import BufferInfo, Session
from transfer.planner import Descriptors
from transfer.writer import Outcome, Pipeline, Write

SIZE = 8 << 20
"""More than the kernels of both sides take at once."""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def info(buffer: np.ndarray) -> BufferInfo:
    return BufferInfo(ptrs=(buffer.ctypes.data,), lengths=(buffer.nbytes,), item_lengths=(1,))


def receive(connection: Connection) -> None:
    """The other process: registers a buffer, cuts its connections and uses the buffer for something else, shows it."""
    buffer = np.zeros(SIZE, dtype=np.uint8)
    engine = KVTransferEngine("127.0.0.1", "tcp")
    engine.register(info(buffer))
    connection.send((engine.session, buffer.ctypes.data, engine.data_ports))
    while word := connection.recv():
        if word == "cut":
            wait_until(IncomingCut(engine.data_ports).passed)
        elif word == "use":
            buffer[:] = 0
        connection.send(buffer.tobytes() if word == "show" else b"")


class Receiver:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=receive, args=(child,), daemon=True)
        self.process.start()
        self.session: Session
        self.session, self.address, [self.data_port] = self.connection.recv()

    def show(self) -> np.ndarray:
        self.connection.send("show")
        return np.frombuffer(self.connection.recv(), dtype=np.uint8)

    def stop(self) -> None:
        process = psutil.Process(self.process.pid)
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        psutil.Process(self.process.pid).resume()

    def nothing_is_on_its_way(self) -> bool:
        """Whether this machine's kernel has delivered everything that was sent to it, or has had it refused."""
        return not any(
            connection.raddr and connection.raddr.port == self.data_port and connection.status != psutil.CONN_TIME_WAIT
            for connection in psutil.net_connections(kind="tcp")
        )


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.process.kill()
    receiver.process.join()


@pytest.fixture
def source() -> np.ndarray:
    return np.full(SIZE, 7, dtype=np.uint8)


@pytest.fixture
def sender(source: np.ndarray) -> KVTransferEngine:
    engine = KVTransferEngine("127.0.0.1", "tcp")
    engine.register(info(source))
    return engine


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders give up soon."""
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")


def batch(source: np.ndarray, address: int, length: int = SIZE) -> Descriptors:
    return Descriptors(*(np.array([value]) for value in (source.ctypes.data, address, length)))


@pytest.mark.usefixtures("impatient")
def test_a_write_that_its_transport_gave_up_lands_nowhere_after_a_cut(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    """Mooncake closes its socket and calls the write failed; the kernel goes on sending what it has of it."""
    channel = sender.channel(receiver.session)
    write(channel, [batch(source, receiver.address, 64)])
    receiver.stop()
    outcome = channel.submit(batch(source, receiver.address)).wait()
    assert outcome is Outcome.GIVEN_UP
    assert outcome.lingers
    receiver.connection.send("cut")
    receiver.connection.send("use")
    receiver.go_on()
    wait_until(receiver.nothing_is_on_its_way)
    assert [receiver.connection.recv() for _ in range(2)] == [b"", b""]
    assert not receiver.show().any(), "no byte came after the slots were used again"

    write(channel, [batch(source, receiver.address)])
    assert np.array_equal(receiver.show(), source), "the pair goes on"


def test_a_cut_costs_whoever_writes_at_the_time_a_repetition(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    pipeline = Pipeline(sender.channel(receiver.session))
    writes = [Write(on_end=lambda: None, go_on=lambda: True) for _ in range(20)]
    for number, one in enumerate(writes):
        if number % 5 == 0:
            receiver.connection.send("cut")
        pipeline.post(one, batch(source, receiver.address))
    pipeline.drain()
    assert {one.outcome for one in writes} == {Outcome.LANDED}
    assert [receiver.connection.recv() for _ in range(4)] == [b""] * 4
    assert np.array_equal(receiver.show(), source)


def test_a_write_to_a_process_that_has_ended_may_linger(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    channel = sender.channel(receiver.session)
    write(channel, [batch(source, receiver.address, 64)])
    receiver.process.kill()
    receiver.process.join()
    assert channel.submit(batch(source, receiver.address)).wait() is Outcome.CUT


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
