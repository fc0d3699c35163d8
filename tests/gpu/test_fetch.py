"""Reading prefixes into device memory: through pinned buffers, and verified before they reach the pages."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from control.messages import AttemptId, Destination
from kvcache.layout import buffer_info
from kvcache.paged_pool import PagedKVPool
from prefill_node.arrival import PrefixArrival
from prefill_node.fetch import Fetch, RunningFetch
from prefill_node.orders import BlockToRead, TransferReport
from prefill_node.pool_io import DeviceSink, SendRings
from tests.identity import IDENTITY
from tests.prefill_node.fakes import LAYOUT, ME
from tests.prefill_node.sending import LateChannel
from tests.prefill_node.world import TCP
from transfer.checksum import digests
from transfer.memory import BufferInfo, Checksums
from transfer.writer import Outcome, Pipeline

CUDA = torch.device("cuda")
TOKENS = 5000
PAGE_SIZE = 16


def fetch_of(
    there: Sequence[torch.Tensor], slots: np.ndarray, start: int, pages: np.ndarray, arrival: PrefixArrival
) -> Fetch:
    """A fetch of positions from `start` on, from these slots of a decode node's layers."""
    buffers, attempt = buffer_info(there), AttemptId("decode", "r", 1)
    found = Checksums.of(list(digests(buffers, slots, start)))
    destination = Destination(identity=IDENTITY, buffers=buffers, sessions=TCP)
    block = BlockToRead(1, attempt, ME, destination, start, start + len(slots), pages, slots, found, 0, False)
    return Fetch(block, lambda report: None, arrival)


class Fetching:
    """A pool on the device, of whose pages every other one is read into, and a decode node's pool."""

    def __init__(self) -> None:
        self.pool = PagedKVPool(LAYOUT, 1 + 2 * TOKENS // PAGE_SIZE, PAGE_SIZE, CUDA)
        self.layers = [*self.pool.kv, *self.pool.index_keys]
        self.pages = np.random.default_rng(0).permutation(self.pool.num_pages)[: -(-TOKENS // PAGE_SIZE)]
        self.there = [torch.randint(0, 256, (TOKENS + 50, length), dtype=torch.uint8) for length in (16, 16, 8)]
        self.slots = np.random.default_rng(1).permutation(TOKENS + 50)[:TOKENS]
        self.channel = LateChannel("tcp")
        self.registered: list[BufferInfo] = []
        rings = SendRings(pin=True, register=self.registered.append)
        self.sink = DeviceSink(self.layers, rings)

    def run(self, start: int, spoilt: bool = False) -> TransferReport:
        arrival = PrefixArrival(LAYOUT.layer_of_buffer)
        fetch = fetch_of(self.there, self.slots[start:], start, self.pages, arrival)
        if spoilt:
            self.there[2][self.slots[-1]] += 1
        return RunningFetch(fetch, Pipeline(self.channel), self.sink, PAGE_SIZE).run(lambda: True)

    def rows(self) -> np.ndarray:
        positions = np.arange(TOKENS)
        return np.asarray(self.pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE)


@pytest.mark.parametrize("start", [0, 64, 4992])
def test_every_item_reaches_its_row_on_the_device_and_no_other_changes(start: int) -> None:
    fetching = Fetching()
    report = fetching.run(start)
    assert report.error is None
    assert report.num_bytes == (TOKENS - start) * 40
    rows = fetching.rows()[start:]
    for here, there in zip(fetching.layers, fetching.there, strict=True):
        expected = torch.zeros(here.shape, dtype=torch.uint8)
        expected[rows] = there[fetching.slots[start:]]
        assert torch.equal(here.cpu(), expected)
    assert len(fetching.registered) == 1
    fetching.sink.close()


def test_what_does_not_match_reaches_no_page() -> None:
    fetching = Fetching()
    report = fetching.run(0, spoilt=True)
    assert report.failure == "checksum"
    assert not fetching.layers[2].any(), "the index keys, of which the last piece was spoilt"


def test_what_was_not_read_reaches_no_page() -> None:
    fetching = Fetching()
    fetching.channel.outcomes = [Outcome.FAILED]
    report = fetching.run(0)
    assert (report.failure, report.in_flight) == ("read", False)
    assert not fetching.layers[0].any()
