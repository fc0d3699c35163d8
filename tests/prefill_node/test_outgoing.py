"""How a chunk becomes batches: what goes out together, which send buffers are filled, and how long it took."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from prefill_node.compute import ForwardProgress
from prefill_node.orders import TransferReport
from prefill_node.plan import ChunkPart
from prefill_node.pool_io import Reading, SendBuffer, SendRing
from prefill_node.sender import Chunk, OutgoingChunk
from tests.prefill_node.sending import CPU, LAYER_OF_BUFFER, LateChannel, Sending, at_slots, wait_until
from transfer.checksum import verify
from transfer.planner import NO_LIMIT, Descriptors
from transfer.writer import BATCHES_IN_FLIGHT, Pending, Pipeline


class Inline:
    """Posts chunks over a channel on the test's thread."""

    def __init__(self, reading: Reading, channel: LateChannel) -> None:
        self.reading = reading
        self._pipeline, self._ring = Pipeline(channel), SendRing(pin=False)
        self._reports: list[TransferReport] = []

    def post(self, chunk: Chunk, may_post: Callable[[], bool] = lambda: True) -> None:
        OutgoingChunk(chunk, self.reading, self._pipeline, lambda: self._ring, self._reports.append).post(may_post)

    def drained(self) -> list[TransferReport]:
        self._pipeline.drain()
        return self._reports


def in_place() -> tuple[Sending, LateChannel]:
    """A channel that takes everything in one batch."""
    sending = Sending("shm")
    channel = sending.channel("a")
    channel.max_batch = NO_LIMIT
    return sending, channel


@pytest.mark.parametrize("computed", [1, 2])
def test_in_place_layers_go_out_together_that_are_computed_already(computed: int) -> None:
    """A batch of several layers costs what a batch of one does; a layer that is not computed is not in it."""
    sending, channel = in_place()
    progress = ForwardProgress(CPU)
    for layer in range(computed):
        progress.layer_done(layer)
    chunk = sending.chunk(stop=800, progress=progress)
    sending.submit(chunk)
    if computed == 1:
        wait_until(lambda: len(channel.posted) == 1)
        progress.layer_done(1)
    sent = sending.reports.get(timeout=10)
    assert sent.error is None
    sending.check_bytes(chunk)
    items, keys = 800 * 4400, 800 * 32
    expected = [items, items, keys] if computed == 1 else [2 * items, keys]
    assert [int(batch.lengths.sum()) for batch in channel.posted] == expected
    assert not verify(sent.checksums, sending.destination().buffers, at_slots(chunk.block), 800)


def test_in_place_items_go_in_the_order_of_their_slots() -> None:
    """Then the destination's page table is walked from end to end."""
    sending, channel = in_place()
    sending.send(sending.chunk(pages="scattered", slots="scattered"))
    [items, keys] = channel.posted
    for layer in (*np.split(items.destinations, 2), keys.destinations):
        assert (np.diff(layer) > 0).all()


def test_a_batch_of_several_layers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_node.sender._IN_PLACE_BYTES", 8 << 20)
    sending, channel = in_place()
    sending.send(sending.chunk(stop=1200))
    assert [int(batch.lengths.sum()) for batch in channel.posted] == [1200 * 4400, 1200 * 4400, 1200 * 32]


def test_send_buffers_that_may_be_read_for_ever_are_not_filled_again() -> None:
    sending = Sending()
    channel = sending.channel("a")
    channel.broken = "wait"
    lane = Inline(sending.reading, channel)
    lane.post(sending.chunk())
    channel.broken = ""
    lane.post(sending.chunk())
    lost, refused = lane.drained()
    assert len(channel.posted) == BATCHES_IN_FLIGHT, "as many as there are buffers"
    assert lost.in_flight
    assert "no send buffer is left" in (refused.error or "")
    assert not refused.in_flight


@pytest.mark.parametrize("given_up", ["aborted", "gather raises"])
def test_no_send_buffer_in_flight_is_filled_when_others_were_not_posted(given_up: str) -> None:
    sending = Sending("tcp")
    source = sending.reading.source
    lane = Inline(sending.reading, sending.channel("a"))

    class Breaking:
        buffers, in_host_memory, digest = source.buffers, True, source.digest

        def gather(self, buffer: int, part: ChunkPart, into: SendBuffer) -> None:
            raise MemoryError

    chunks = [sending.chunk(start=start, stop=start + 100) for start in (0, 100)]
    lane.post(chunks[0])
    for _ in range(BATCHES_IN_FLIGHT - len(LAYER_OF_BUFFER)):
        if given_up != "aborted":
            lane.reading = dataclasses.replace(sending.reading, source=Breaking())
        lane.post(sending.chunk(start=200, stop=300), lambda: given_up != "aborted")
        lane.reading = sending.reading
    lane.post(chunks[1])
    works = [chunk.block.work for chunk in chunks]
    assert [sent.error for sent in lane.drained() if sent.work in works] == [None, None]
    sending.check_bytes(sending.chunk(stop=200))


def test_seconds_of_sending_leave_out_waits_for_layers_and_for_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def passes(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return True

    class Computing(ForwardProgress):
        def is_done(self, layer: int) -> bool:
            return layer == 0

        def wait(self, layer: int, cancelled: Callable[[], bool]) -> None:
            passes(70.0)

    class Carrying(LateChannel):
        def submit(self, batch: Descriptors) -> Pending:
            passes(1.0)
            return super().submit(batch)

    monkeypatch.setattr("prefill_node.sender.time", SimpleNamespace(monotonic=lambda: now))
    sending = Sending("tcp")
    channel = Carrying("tcp")
    lane = Inline(sending.reading, channel)
    lane.post(sending.chunk(stop=100, progress=Computing(CPU)), lambda: passes(500.0))
    [sent] = lane.drained()
    assert len(channel.posted) == len(LAYER_OF_BUFFER)
    assert sent.seconds() == len(LAYER_OF_BUFFER) * 1.0
    assert sent.seconds(since=sent.ended_at) == 0.0
