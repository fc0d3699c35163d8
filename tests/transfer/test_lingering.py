"""Real Mooncake over TCP, and bytes that its kernel still has when it calls a write failed."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest

from tests.e2e.hosts import Network, why_not
from transfer.engine import KVTransferEngine
from transfer.incoming import IncomingCut
from transfer.memory import BufferInfo
from transfer.planner import Descriptors
from transfer.writer import Outcome, Pipeline, Write

SIZE = 4 << 20


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def start_engine(host: str) -> tuple[KVTransferEngine, np.ndarray]:
    """An engine, and a buffer of zeros that is registered."""
    buffer = np.zeros(SIZE, dtype=np.uint8)
    engine = KVTransferEngine(host, "tcp")
    engine.register(BufferInfo(ptrs=(buffer.ctypes.data,), lengths=(SIZE,), item_lengths=(1,)))
    return engine, buffer


class Receiving:
    """What the receiving process does when it is asked to."""

    def __init__(self, host: str) -> None:
        self.engine, self.buffer = start_engine(host)

    def where(self) -> tuple[Any, int, int]:
        [port] = self.engine.fenced_ports
        return self.engine.session, self.buffer.ctypes.data, port

    def cut(self) -> None:
        wait_until(IncomingCut(self.engine.fenced_ports).passed)

    def use_for_something_else(self) -> None:
        self.buffer[:] = 1

    def content(self) -> bytes:
        return self.buffer.tobytes()

    def values(self) -> list[int]:
        return np.unique(self.buffer).tolist()


class Sending:
    """What the sending process does: it writes sevens."""

    def __init__(self, host: str) -> None:
        self.engine, self.buffer = start_engine(host)
        self.buffer[:] = 7

    def write(self, session: Any, address: int, length: int, times: int = 1) -> Outcome:
        pipeline = Pipeline(self.engine.channel(session))
        write = Write(on_end=lambda: None, go_on=lambda: True)
        for _ in range(times):
            self._post(pipeline, write, address, length)
        pipeline.drain()
        return write.outcome

    def write_until_something_lingers(self, session: Any, address: int, length: int) -> Outcome:
        """How a write ends that goes on until one of its batches was cut."""
        pipeline = Pipeline(self.engine.channel(session))
        write = Write(on_end=lambda: None, go_on=lambda: True)
        wait_until(lambda: self._post(pipeline, write, address, length) and write.lingers)
        pipeline.drain()
        return write.outcome

    def _post(self, pipeline: Pipeline, write: Write, address: int, length: int) -> bool:
        return pipeline.post(
            write, Descriptors(*(np.array([value]) for value in (self.buffer.ctypes.data, address, length)))
        )

    def see_everything_delivered_or_refused(self, port: int) -> None:
        """Wait until the kernel has nothing left that was sent to that port."""
        wait_until(
            lambda: (
                not any(
                    connection.raddr and connection.raddr.port == port and connection.status != psutil.CONN_TIME_WAIT
                    for connection in psutil.net_connections(kind="tcp")
                )
            )
        )


def serve(connection: Connection, role: type[Receiving] | type[Sending], host: str) -> None:
    actor = role(host)
    while True:
        name, *arguments = connection.recv()
        connection.send(getattr(actor, name)(*arguments))


class Process:
    """One of the two, which does what it is asked, in order."""

    def __init__(self, role: type[Receiving] | type[Sending], host: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self.process = context.Process(target=serve, args=(child, role, host), daemon=True)
        self.process.start()

    def ask(self, name: str, *arguments: object) -> None:
        self._connection.send((name, *arguments))

    def has_answered(self) -> bool:
        return self._connection.poll()

    def answer(self) -> Any:
        return self._connection.recv()

    def do(self, name: str, *arguments: object) -> Any:
        self.ask(name, *arguments)
        return self.answer()

    def stop(self) -> None:
        process = psutil.Process(self.process.pid)
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        psutil.Process(self.process.pid).resume()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Pair:
    def __init__(self, sender: Process, receiver: Process) -> None:
        self.sender, self.receiver = sender, receiver
        self.session, self.address, self.port = receiver.do("where")

    def write(self, length: int) -> Outcome:
        outcome: Outcome = self.sender.do("write", self.session, self.address, length)
        return outcome


@pytest.fixture
def start() -> Iterator[Callable[..., Pair]]:
    """Starts a pair of processes, on hosts of their own where these are given with their addresses."""
    started: list[Process] = []

    def start(*places: tuple[AbstractContextManager[None], str]) -> Pair:
        roles = (Sending, Receiving)
        for role, (inside, address) in zip(roles, places or [(nullcontext(), "127.0.0.1")] * 2, strict=True):
            with inside:
                started.append(Process(role, address))
        return Pair(*started)

    yield start
    for process in started:
        process.end()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake waits for two seconds only: of less, a busy machine may keep a peer waiting that is well."""
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "2")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.usefixtures("impatient")
def test_a_write_that_failed_in_a_partition_lands_nowhere_after_a_cut(start: Callable[..., Pair]) -> None:
    """Mooncake closes its socket and calls the write failed; the kernel goes on trying to send what it has of it."""
    with Network("data") as network:
        hosts = [network.host(name) for name in ("prefill", "decode")]
        pair = start(*((host.entered(), host.addresses["data"]) for host in hosts))
        assert pair.write(64) is Outcome.LANDED
        network.part(*hosts)
        outcome = pair.write(SIZE)
        assert outcome is Outcome.GIVEN_UP
        assert outcome.lingers
        pair.receiver.do("cut")
        pair.receiver.do("use_for_something_else")
        network.join(*hosts)
        pair.sender.do("see_everything_delivered_or_refused", pair.port)
        assert pair.receiver.do("values") == [1]
        assert pair.write(SIZE) is Outcome.LANDED, "the pair goes on"
        assert pair.receiver.do("values") == [7]


@pytest.mark.usefixtures("impatient")
def test_a_write_to_a_stopped_process_lands_nowhere_after_a_cut(start: Callable[..., Pair]) -> None:
    """What the kernels of both sides had taken of it is read by Mooncake as soon as it runs again."""
    pair = start()
    assert pair.write(64) is Outcome.LANDED
    pair.receiver.stop()
    assert pair.write(SIZE) is Outcome.GIVEN_UP
    pair.receiver.ask("cut")
    pair.receiver.ask("use_for_something_else")
    pair.receiver.go_on()
    pair.sender.do("see_everything_delivered_or_refused", pair.port)
    assert [pair.receiver.answer() for _ in range(2)] == [None, None]
    assert pair.receiver.do("values") == [1]


def test_a_cut_costs_whoever_writes_at_the_time_a_repetition(start: Callable[..., Pair]) -> None:
    """Connections do not say whose they are, so all are closed."""
    pair = start()
    assert pair.write(64) is Outcome.LANDED
    pair.sender.ask("write_until_something_lingers", pair.session, pair.address, SIZE)
    while not pair.sender.has_answered():
        pair.receiver.do("cut")
    assert pair.sender.answer() is Outcome.LANDED, "though the copy that was cut may land later"
    assert pair.receiver.do("values") == [7]


def test_a_write_after_a_cut_lands_over_a_new_connection(start: Callable[..., Pair]) -> None:
    pair = start()
    assert pair.sender.do("write", pair.session, pair.address, 1 << 20, 20) is Outcome.LANDED
    pair.receiver.do("cut")
    assert pair.write(64) is Outcome.LANDED


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_write_to_a_process_that_has_ended_may_linger(start: Callable[..., Pair]) -> None:
    pair = start()
    assert pair.write(64) is Outcome.LANDED
    pair.receiver.end()
    assert pair.write(SIZE).lingers
