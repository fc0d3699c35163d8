"""Real Mooncake over TCP, between two processes."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.transfer.test_lingering import SIZE, Process, Receiving
from tests.transfer.world import descriptors, write
from transfer.engine import KVTransferEngine
from transfer.memory import BufferInfo
from transfer.writer import TransferError


def info(buffer: np.ndarray) -> BufferInfo:
    return BufferInfo(ptrs=(buffer.ctypes.data,), lengths=(buffer.nbytes,), item_lengths=(1,))


class Receiver:
    """Another process, and its buffer."""

    def __init__(self) -> None:
        self.process = Process(Receiving, "127.0.0.1")
        self.session, self.address, _ = self.process.do("where")
        self.kill = self.process.end

    def content(self) -> np.ndarray:
        return np.frombuffer(self.process.do("content"), dtype=np.uint8)


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


def test_more_descriptors_than_the_transport_takes_at_once_all_land(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    """The TCP transport refuses a batch of some 2000 descriptors outright: writes are windowed."""
    order = np.random.default_rng(1).permutation(3000).tolist()
    write(
        sender.channel(receiver.session),
        [descriptors(source.ctypes.data, receiver.address, [(i * 64, j * 64, 64) for i, j in enumerate(order)])],
    )
    expected = np.zeros(SIZE, dtype=np.uint8)
    expected[: 3000 * 64].reshape(3000, 64)[order] = source[: 3000 * 64].reshape(3000, 64)
    assert np.array_equal(receiver.content(), expected)


def test_after_a_write_outside_the_buffer_the_next_write_works(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    """sglang 13054: one transfer error must not mark a healthy pair as failed for ever."""
    with pytest.raises(TransferError):
        write(
            sender.channel(receiver.session),
            [descriptors(source.ctypes.data, receiver.address, [(0, SIZE - 10, 4096), (0, 0, 64)])],
        )
    write(sender.channel(receiver.session), [descriptors(source.ctypes.data, receiver.address, [(0, 0, SIZE)])])
    assert np.array_equal(receiver.content(), source)


def test_an_abort_stops_the_rest_and_leaves_nothing_in_flight(
    sender: KVTransferEngine, source: np.ndarray, receiver: Receiver
) -> None:
    answers = iter([True] * 10)
    complete = write(
        sender.channel(receiver.session),
        [descriptors(source.ctypes.data, receiver.address, [(i * 64, i * 64, 64)]) for i in range(1000)],
        go_on=lambda: next(answers, False),
    )
    assert not complete
    content = receiver.content()
    assert np.array_equal(content[: 10 * 64], source[: 10 * 64])
    assert not content[10 * 64 :].any()


def test_what_was_unregistered_cannot_be_written(sender: KVTransferEngine, source: np.ndarray) -> None:
    target = np.zeros(4096, dtype=np.uint8)
    sender.register(info(target))
    write(sender.channel(sender.session), [descriptors(source.ctypes.data, target.ctypes.data, [(0, 0, 64)])])
    assert np.array_equal(target[:64], source[:64])
    sender.unregister(info(target))
    with pytest.raises(TransferError):
        write(sender.channel(sender.session), [descriptors(source.ctypes.data, target.ctypes.data, [(0, 64, 64)])])
    assert not target[64:].any()


def test_a_dead_receiver_is_an_error(sender: KVTransferEngine, source: np.ndarray) -> None:
    receiver = Receiver()
    receiver.kill()
    with pytest.raises(TransferError):
        write(sender.channel(receiver.session), [descriptors(source.ctypes.data, receiver.address, [(0, 0, SIZE)])])
