"""Real Mooncake over TCP, between two processes."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.transfer.test_lingering import SIZE, Process, Receiving
from tests.transfer.world import descriptors, write
from transfer.engine import KVTransferEngine
from transfer.memory import BufferInfo
from transfer.writer import TransferError


def info(buffer: np.ndarray) -> BufferInfo:
    return BufferInfo(ptrs=(buffer.ctypes.data,), lengths=(buffer.nbytes,), item_lengths=(1,))


class Link:
    """An engine of this process with random bytes, and another process with a buffer of zeros."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(0).integers(1, 256, SIZE, dtype=np.uint8)
        self.engine = KVTransferEngine("127.0.0.1", "tcp")
        self.engine.register(info(self.source))

    def renew_receiver(self) -> None:
        self.receiver = Process(Receiving, "127.0.0.1")
        self.session, self.address, _ = self.receiver.do("where")

    def write(self, *batches: list[tuple[int, int, int]], go_on: Callable[[], bool] = lambda: True) -> bool:
        """Each batch: (offset from the source, offset from the destination, length)."""
        found = [descriptors(self.source.ctypes.data, self.address, batch) for batch in batches]
        return write(self.engine.channel(self.session), found, go_on)

    def content(self) -> np.ndarray:
        return np.frombuffer(self.receiver.do("content"), dtype=np.uint8)


@pytest.fixture(scope="module")
def link_of_module() -> Link:
    return Link()


@pytest.fixture
def link(link_of_module: Link) -> Iterator[Link]:
    link_of_module.renew_receiver()
    yield link_of_module
    link_of_module.receiver.end()


def test_more_descriptors_than_the_transport_takes_at_once_all_land(link: Link) -> None:
    """The TCP transport refuses a batch of some 2000 descriptors outright: writes are windowed."""
    order = np.random.default_rng(1).permutation(3000).tolist()
    link.write([(i * 64, j * 64, 64) for i, j in enumerate(order)])
    expected = np.zeros(SIZE, dtype=np.uint8)
    expected[: 3000 * 64].reshape(3000, 64)[order] = link.source[: 3000 * 64].reshape(3000, 64)
    assert np.array_equal(link.content(), expected)


def test_after_a_write_outside_the_buffer_the_next_write_works(link: Link) -> None:
    """sglang 13054: one transfer error must not mark a healthy pair as failed for ever."""
    with pytest.raises(TransferError):
        link.write([(0, SIZE - 10, 4096), (0, 0, 64)])
    link.write([(0, 0, SIZE)])
    assert np.array_equal(link.content(), link.source)


def test_what_was_unregistered_cannot_be_written(link: Link) -> None:
    target = np.zeros(4096, dtype=np.uint8)
    link.engine.register(info(target))
    link.session, link.address = link.engine.session, target.ctypes.data
    link.write([(0, 0, 64)])
    assert np.array_equal(target[:64], link.source[:64])
    link.engine.unregister(info(target))
    with pytest.raises(TransferError):
        link.write([(0, 64, 64)])
    assert not target[64:].any()


def test_a_dead_receiver_is_an_error(link: Link) -> None:
    link.receiver.end()
    with pytest.raises(TransferError):
        link.write([(0, 0, SIZE)])
