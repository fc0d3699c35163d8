"""Chunks leave layer by layer, after the device has written them, over the way that suits the transport."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from prefill_node.compute import ForwardProgress
from prefill_node.orders import TransferReport
from prefill_node.plan import ChunkPart
from prefill_node.pool_io import Reading, SendBuffer, SendRing
from prefill_node.sender import Chunk, OutgoingChunk
from tests.prefill_node.sending import (
    CPU,
    LAYER_OF_BUFFER,
    NUM_PAGES,
    PAGE_SIZE,
    PARTS,
    LateChannel,
    LateCopy,
    Sending,
    at_slots,
    wait_until,
)
from transfer.checksum import verify
from transfer.choices import Transport
from transfer.planner import NO_LIMIT, Descriptors
from transfer.writer import BATCHES_IN_FLIGHT, Outcome, Pipeline, TransferError


@pytest.fixture
def sending() -> Iterator[Sending]:
    sending = Sending()
    yield sending
    sending.sender.stop(timeout=5)


@pytest.mark.parametrize("transport", ["tcp", "shm", "rdma"])
@pytest.mark.parametrize("pages", ["scattered", "contiguous"])
@pytest.mark.parametrize("slots", ["scattered", "contiguous"])
@pytest.mark.parametrize(("start", "stop"), [(0, NUM_PAGES * PAGE_SIZE), (3, 2399), (5, 6)])
def test_every_item_of_every_layer_arrives_at_its_slot(
    transport: Transport, pages: str, slots: str, start: int, stop: int
) -> None:
    """Also from send buffers: each is still being read when the fifth after it is filled."""
    sending = Sending(transport)
    chunk = sending.chunk(start=start, stop=stop, pages=pages, slots=slots)
    sent = sending.send(chunk)
    assert sent.error is None
    sending.check_bytes(chunk)
    assert sent.num_bytes == (stop - start) * (2 * 4400 + 32)
    assert sent.num_descriptors == sum(len(batch.lengths) for batch in sending.channel("a").posted)
    assert not verify(sent.checksums, sending.destination().buffers, at_slots(chunk.block), NUM_PAGES * PAGE_SIZE)
    assert sum(c.stop - c.start for c in sent.checksums) == 3 * (stop - start)


@pytest.mark.parametrize("pages", ["scattered", "contiguous"])
def test_no_descriptor_is_longer_than_the_transport_takes(pages: str) -> None:
    """From send buffers and in place; longer ones than that leave connections idle."""
    sending = Sending("tcp")
    channel = sending.channel("a")
    channel.max_bytes = 1_000_000
    chunk = sending.chunk(pages=pages, slots="contiguous")
    sent = sending.send(chunk)
    assert sent.error is None
    sending.check_bytes(chunk)
    lengths = [int(length) for batch in channel.posted for length in batch.lengths]
    assert max(lengths) <= channel.max_bytes
    assert sent.num_descriptors == len(lengths)
    assert sum(lengths) == sent.num_bytes


def test_over_tcp_scattered_pages_go_out_in_few_large_descriptors() -> None:
    """30 us per descriptor: 600 pages of 17 KiB would take longer than their bytes."""
    sending = Sending("tcp")
    sent = sending.send(sending.chunk(pages="scattered", slots="contiguous"))
    assert sent.num_descriptors == 2 * PARTS + 1, "some send buffers for each layer of items, one for the keys"
    assert len(sending.registered) == 1
    again = sending.send(sending.chunk(pages="scattered", slots="contiguous"))
    assert again.error is None
    assert len(sending.registered) == 1, "send buffers are kept"


@pytest.mark.parametrize(
    ("transport", "pages", "slots"),
    [
        ("tcp", "contiguous", "contiguous"),
        ("tcp", "scattered", "scattered"),
        ("rdma", "scattered", "contiguous"),
        ("shm", "scattered", "contiguous"),
    ],
)
def test_where_gathering_does_not_pay_the_source_is_the_pool_itself(
    transport: Transport, pages: str, slots: str
) -> None:
    """RDMA reads in place whatever lies where: it could not be run here, so its policy is what is tested."""
    sending = Sending(transport)
    sending.send(sending.chunk(pages=pages, slots=slots))
    assert not sending.registered
    for batch in sending.channel("a").posted:
        for source, _, length in zip(*batch, strict=True):
            assert any(
                layer.data_ptr() <= source and source + length <= layer.data_ptr() + layer.nbytes
                for layer in sending.layers
            )


def test_no_write_is_posted_before_the_device_event_of_its_layer(sending: Sending) -> None:
    """sglang PR 30254: the NIC read KV that the compute stream had not finished writing."""
    progress = ForwardProgress(CPU)
    sending.submit(sending.chunk(progress=progress))
    time.sleep(0.1)
    assert sending.channel("a").posted == []
    progress.layer_done(0)
    wait_until(lambda: len(sending.channel("a").posted) == PARTS)
    time.sleep(0.1)
    assert len(sending.channel("a").posted) == PARTS, "the first layer is out while the second computes"
    progress.layer_done(1)
    assert sending.reports.get(timeout=10).error is None


@pytest.mark.parametrize("computed", [1, 2])
def test_in_place_layers_go_out_together_that_are_computed_already(computed: int) -> None:
    """A batch of several layers costs what a batch of one does; a layer that is not computed is not in it."""
    sending = Sending("shm")
    channel = sending.channel("a")
    channel.max_batch = NO_LIMIT
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
    sending = Sending("shm")
    channel = sending.channel("a")
    channel.max_batch = NO_LIMIT
    sending.send(sending.chunk(pages="scattered", slots="scattered"))
    [items, keys] = channel.posted
    for layer in (*np.split(items.destinations, 2), keys.destinations):
        assert (np.diff(layer) > 0).all()


def test_a_batch_of_several_layers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort is heard between batches."""
    monkeypatch.setattr("prefill_node.sender._IN_PLACE_BYTES", 8 << 20)
    sending = Sending("shm")
    channel = sending.channel("a")
    channel.max_batch = NO_LIMIT
    sending.send(sending.chunk(stop=1200))
    assert [int(batch.lengths.sum()) for batch in channel.posted] == [1200 * 4400, 1200 * 4400, 1200 * 32]


def test_a_layer_waits_for_its_event_on_the_device() -> None:
    progress = ForwardProgress(CPU)
    finished = threading.Event()

    class DeviceEvent:
        def synchronize(self) -> None:
            finished.wait(10)

    progress._events.append(DeviceEvent())  # type: ignore[arg-type]
    waiting = threading.Thread(target=progress.wait, args=(0, lambda: False), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    finished.set()
    waiting.join(10)
    assert not waiting.is_alive()


def test_chunks_of_a_pass_that_failed_are_given_up(sending: Sending) -> None:
    progress = ForwardProgress(CPU)
    progress.layer_done(0)
    sending.submit(sending.chunk(progress=progress))
    progress.fail()
    assert sending.reports.get(timeout=10).error == "aborted"


def test_a_slow_receiver_delays_only_its_own_requests(sending: Sending) -> None:
    hold = sending.channel("slow").hold = threading.Event()
    slow = sending.chunk("slow")
    sending.submit(slow)
    for _ in range(3):
        fast = sending.chunk("fast")
        assert sending.send(fast).work == fast.block.work
    hold.set()
    assert sending.reports.get(timeout=10).work == slow.block.work


def test_a_chunk_that_was_given_up_is_not_posted(sending: Sending) -> None:
    assert sending.send(sending.chunk(cancelled=lambda: True)).error == "aborted"
    assert sending.channel("a").posted == []


def test_an_abort_stops_a_chunk_between_batches(sending: Sending) -> None:
    progress = ForwardProgress(CPU)
    progress.layer_done(0)
    aborted = threading.Event()
    sending.submit(sending.chunk(progress=progress, cancelled=aborted.is_set))
    wait_until(lambda: len(sending.channel("a").posted) == PARTS)
    aborted.set()
    progress.layer_done(1)
    assert sending.reports.get(timeout=10).error == "aborted"
    assert len(sending.channel("a").posted) == PARTS


def test_nothing_is_posted_to_a_decode_node_that_is_not_heard(sending: Sending) -> None:
    """A writer that was stopped for long must not write to whatever process has the address by then."""
    sending.silence = 10.0
    sending.submit(sending.chunk())
    time.sleep(0.2)
    assert sending.channel("a").posted == []
    sending.silence = 0.0
    assert sending.reports.get(timeout=10).error is None


def test_a_failed_write_is_reported_and_the_next_one_goes_out(sending: Sending) -> None:
    """sglang 13054: one transient error marked a healthy pair as failed for ever."""
    sending.channel("a").error = TransferError("the process has ended")
    assert sending.send(sending.chunk()).error == "the process has ended"
    sending.channel("a").error = None
    assert sending.send(sending.chunk()).error is None


def test_a_chunk_that_was_cut_and_has_landed_when_it_was_posted_again_may_linger(sending: Sending) -> None:
    """Its first copy may arrive when the slots are somebody else's, and nobody was told."""
    channel = sending.channel("a")
    channel.attempts = 2
    channel.outcomes = [Outcome.CUT]
    chunk = sending.chunk()
    sent = sending.send(chunk)
    assert (sent.error, sent.lingering) == (None, True)
    sending.check_bytes(chunk)
    assert not sending.send(sending.chunk()).lingering


def test_a_decode_node_without_a_route_costs_its_requests(sending: Sending) -> None:
    sending.unreachable = True
    assert "no route" in (sending.send(sending.chunk()).error or "")
    sending.unreachable = False
    assert sending.send(sending.chunk()).error is None


@pytest.mark.parametrize("broken", ["submit", "wait", "check", "connect", "ring"])
def test_whatever_fails_every_chunk_is_reported_once_and_the_next_ones_are_sent(sending: Sending, broken: str) -> None:
    """The thread ended, and all that its decode node had here kept its pages for ever."""
    match broken:
        case "connect":
            sending.connecting_is_broken = True
        case "ring":
            sending.registering_is_broken = True
        case _:
            sending.channel("a").broken = broken
    chunks = [sending.chunk(start=start, stop=start + 100) for start in range(0, 300, 100)]
    for chunk in chunks:
        sending.submit(chunk)
    failed = [sending.reports.get(timeout=10) for _ in chunks]
    assert [sent.work for sent in failed] == [chunk.block.work for chunk in chunks]
    assert all(sent.error for sent in failed)
    unknown = broken in ("submit", "wait")
    assert [sent.in_flight for sent in failed] == [unknown] * 3, "what may be in flight is never called quiet"
    sending.connecting_is_broken = sending.registering_is_broken = False
    sending.channel("a").broken = ""
    sent = sending.send(sending.chunk(start=300, stop=400))
    assert (sent.error, sent.in_flight) == (None, False)
    assert sending.sender.stop(timeout=5)
    assert sending.reports.empty()
    assert len(sending.sender.kept) == unknown, "what may be read stays mapped; the rest is given back"


def test_a_channel_that_cannot_be_closed_costs_nothing(sending: Sending) -> None:
    sending.channel("a").broken = "close"
    assert sending.send(sending.chunk()).error is None
    assert sending.sender.stop(timeout=5)
    assert sending.channel("a").closed
    again = sending.send(sending.chunk("b"))
    assert again.error is None
    assert len(sending.registered) == 1, "its send buffers came back"


def test_send_buffers_that_may_be_read_for_ever_are_not_filled_again(sending: Sending) -> None:
    channel = sending.channel("a")
    channel.broken = "wait"
    pipeline, ring = Pipeline(channel), SendRing(pin=False)
    reports: list[TransferReport] = []
    OutgoingChunk(sending.chunk(), sending.reading, pipeline, lambda: ring, reports.append).post(lambda: True)
    channel.broken = ""
    OutgoingChunk(sending.chunk(), sending.reading, pipeline, lambda: ring, reports.append).post(lambda: True)
    pipeline.drain()
    lost, refused = reports
    assert len(channel.posted) == BATCHES_IN_FLIGHT, "as many as there are buffers"
    assert lost.in_flight
    assert "no send buffer is left" in (refused.error or "")
    assert not refused.in_flight


def test_a_bug_in_the_thread_itself_costs_the_chunks_that_it_has_taken(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Pipeline) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as breaking:
        breaking.setattr(Pipeline, "settle_oldest", broken)
        sending.submit(sending.chunk(stop=100))
        sent = sending.reports.get(timeout=10)
    assert (sent.in_flight, sent.error) == (True, "transfer failed: a bug")
    assert sending.send(sending.chunk(start=100, stop=200)).error is None
    assert sending.sender.stop(timeout=5)
    assert sending.reports.empty(), "its writes have ended since, which is not told a second time"


def test_the_next_chunk_is_on_its_way_before_the_last_one_has_ended(sending: Sending) -> None:
    """Between two chunks the transport would run dry."""
    chunks = [sending.chunk(start=start, stop=start + 100) for start in range(0, 1000, 100)]
    hold = sending.channel("a").hold = threading.Event()
    for chunk in chunks:
        sending.submit(chunk)
    hold.set()
    sent = [sending.reports.get(timeout=10) for _ in chunks]
    assert [one.work for one in sent] == [chunk.block.work for chunk in chunks]
    assert not any(one.error for one in sent)
    assert sending.channel("a").most_late == BATCHES_IN_FLIGHT


def test_a_sender_that_is_stopped_sees_what_it_has_posted_to_its_end(sending: Sending) -> None:
    for start in range(0, 500, 100):
        sending.submit(sending.chunk(start=start, stop=start + 100))
    assert sending.sender.stop(timeout=5)
    assert [sending.reports.get(timeout=1).error for _ in range(5)] == [None] * 5
    assert sending.channel("a").late == 0


def test_what_has_ended_is_reported_while_the_next_chunk_waits_for_its_layer(sending: Sending) -> None:
    sending.submit(sending.chunk())
    given_up = threading.Event()
    sending.submit(sending.chunk(progress=ForwardProgress(CPU), cancelled=given_up.is_set))
    assert sending.reports.get(timeout=10).error is None
    given_up.set()


def test_threads_end_when_no_request_needs_them_and_begin_again(sending: Sending) -> None:
    for boot in ("a", "b", "c"):
        assert sending.send(sending.chunk(boot, stop=1)).error is None
    sending.sender.keep_only({"c"})
    wait_until(lambda: sending.channel("a").closed and sending.channel("b").closed)
    assert not sending.channel("c").closed
    assert sending.send(sending.chunk("a", stop=1)).error is None
    assert sending.sender.stop(timeout=5)


@pytest.mark.parametrize("given_up", ["aborted", "gather raises"])
def test_a_send_buffer_from_which_nothing_was_posted_is_the_next_one_and_none_in_flight_is_filled(
    given_up: str,
) -> None:
    """Buffers used in turn came round too early when a chunk was given up between its gather and its post."""
    sending = Sending("tcp")
    source = sending.reading.source
    pipeline, ring = Pipeline(sending.channel("a")), SendRing(pin=False)
    reports: list[TransferReport] = []

    def outgoing(chunk: Chunk, reading: Reading = sending.reading) -> OutgoingChunk:
        return OutgoingChunk(chunk, reading, pipeline, lambda: ring, reports.append)

    class Breaking:
        buffers, in_host_memory, digest = source.buffers, True, source.digest

        def gather(self, buffer: int, part: ChunkPart, into: SendBuffer) -> None:
            raise MemoryError

    chunks = [sending.chunk(start=start, stop=start + 100) for start in (0, 100)]
    outgoing(chunks[0]).post(lambda: True)
    for _ in range(BATCHES_IN_FLIGHT - len(LAYER_OF_BUFFER)):
        abandoned = sending.chunk(start=200, stop=300)
        if given_up == "aborted":
            outgoing(abandoned).post(lambda: False)
        else:
            outgoing(abandoned, dataclasses.replace(sending.reading, source=Breaking())).post(lambda: True)
    outgoing(chunks[1]).post(lambda: True)
    pipeline.drain()
    works = [chunk.block.work for chunk in chunks]
    assert [sent.error for sent in reports if sent.work in works] == [None, None]
    sending.check_bytes(sending.chunk(stop=200))


def test_what_sending_took_leaves_out_waits_for_layers_and_for_leave_to_post(monkeypatch: pytest.MonkeyPatch) -> None:
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
        def submit(self, batch: Descriptors) -> LateCopy:
            passes(1.0)
            return super().submit(batch)

    monkeypatch.setattr("prefill_node.sender.time", SimpleNamespace(monotonic=lambda: now))
    sending = Sending("tcp")
    channel = Carrying("tcp")
    pipeline, ring = Pipeline(channel), SendRing(pin=False)
    reports: list[TransferReport] = []
    chunk = sending.chunk(stop=100, progress=Computing(CPU))
    OutgoingChunk(chunk, sending.reading, pipeline, lambda: ring, reports.append).post(lambda: passes(500.0))
    pipeline.drain()
    [sent] = reports
    assert len(channel.posted) == len(LAYER_OF_BUFFER)
    assert sent.seconds() == len(LAYER_OF_BUFFER) * 1.0
    assert sent.seconds(since=sent.ended_at) == 0.0
