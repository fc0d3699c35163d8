"""Real Mooncake over TCP, between two processes."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from tests.transfer.world import write
from transfer.engine import KVTransferEngine
from transfer.memory import BufferInfo, Session
from transfer.planner import Descriptors
from transfer.writer import TransferError

SIZE = 4 << 20


def info(buffer: np.ndarray) -> BufferInfo:
    return BufferInfo(ptrs=(buffer.ctypes.data,), lengths=(buffer.nbytes,), item_lengths=(1,))


def receive(connection: Connection) -> None:
    """The other process: registers a buffer and hands out its bytes when asked."""
    buffer = np.zeros(SIZE, dtype=np.uint8)
    engine = KVTransferEngine("127.0.0.1", "tcp")
    engine.register(info(buffer))
    connection.send((engine.session.name, buffer.ctypes.data))
    while connection.recv():
        connection.send(buffer.tobytes())


class Receiver:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self.process = context.Process(target=receive, args=(child,), daemon=True)
        self.process.start()
        name, self.address = self._connection.recv()
        self.session = Session(transport="tcp", name=name)

    def content(self) -> np.ndarray:
        self._connection.send(True)
        return np.frombuffer(self._connection.recv(), dtype=np.uint8)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.kill()


@pytest.fixture(scope="module")
def source() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def sender(source: np.ndarray) -> KVTransferEngine:
    engine = KVTransferEngine("127.0.0.1", "tcp")
    engine.register(info(source))
    return engine


def batch(source: np.ndarray, address: int, pieces: list[tuple[int, int, int]]) -> Descriptors:
    columns = np.array(pieces, dtype=np.int64).T
    return Descriptors(source.ctypes.data + columns[0], address + columns[1], columns[2])


def batches(source: np.ndarray, address: int, pieces: list[tuple[int, int, int]]) -> list[Descriptors]:
    return [batch(source, address, pieces)]


def test_more_descriptors_than_the_transport_takes_at_once_all_land(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    """The TCP transport refuses a batch of some 2000 descriptors outright: writes are windowed."""
    order = np.random.default_rng(1).permutation(3000).tolist()
    write(
        sender.channel(receiver.session),
        batches(source, receiver.address, [(i * 64, j * 64, 64) for i, j in enumerate(order)]),
    )
    expected = np.zeros(SIZE, dtype=np.uint8)
    expected[: 3000 * 64].reshape(3000, 64)[order] = source[: 3000 * 64].reshape(3000, 64)
    assert np.array_equal(receiver.content(), expected)


def test_a_write_outside_the_registered_buffer_is_an_error_and_the_next_write_works(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    """sglang 13054: one transfer error must not mark a healthy pair as failed for ever."""
    with pytest.raises(TransferError):
        write(sender.channel(receiver.session), batches(source, receiver.address, [(0, SIZE - 10, 4096), (0, 0, 64)]))
    write(sender.channel(receiver.session), batches(source, receiver.address, [(0, 0, SIZE)]))
    assert np.array_equal(receiver.content(), source)


def test_an_abort_stops_the_rest_and_leaves_nothing_in_flight(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    answers = iter([True] * 10)
    complete = write(
        sender.channel(receiver.session),
        [batch(source, receiver.address, [(i * 64, i * 64, 64)]) for i in range(1000)],
        go_on=lambda: next(answers, False),
    )
    assert not complete
    content = receiver.content()
    assert np.array_equal(content[: 10 * 64], source[: 10 * 64])
    assert not content[10 * 64 :].any()


def test_what_was_unregistered_cannot_be_written(sender: KVTransferEngine, source: np.ndarray) -> None:
    target = np.zeros(4096, dtype=np.uint8)
    sender.register(info(target))
    write(sender.channel(sender.session), batches(source, target.ctypes.data, [(0, 0, 64)]))
    assert np.array_equal(target[:64], source[:64])
    sender.unregister(info(target))
    with pytest.raises(TransferError):
        write(sender.channel(sender.session), batches(source, target.ctypes.data, [(0, 64, 64)]))
    assert not target[64:].any()


def test_a_dead_receiver_is_an_error(sender: KVTransferEngine, source: np.ndarray) -> None:
    receiver = Receiver()
    receiver.kill()
    with pytest.raises(TransferError):
        write(sender.channel(receiver.session), batches(source, receiver.address, [(0, 0, SIZE)]))
