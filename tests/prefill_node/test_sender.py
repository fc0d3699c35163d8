"""Chunks leave layer by layer, after the device has written them, over the way that suits the transport."""

import threading
import time
from collections.abc import Iterator

import pytest

from prefill_node.compute import ForwardProgress
from tests.prefill_node.sending import (
    CPU,
    NUM_PAGES,
    PAGE_SIZE,
    PARTS,
    Sending,
    at_slots,
    wait_until,
)
from transfer.checksum import verify
from transfer.choices import Transport
from transfer.transports import NoRoute
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
    chunk = sending.chunk()
    chunk.cancel()
    assert sending.send(chunk).error == "aborted"
    assert sending.channel("a").posted == []


@pytest.mark.parametrize("has_failed", [False, True])
def test_an_abort_or_a_failed_pass_stops_a_chunk_between_batches(sending: Sending, has_failed: bool) -> None:
    progress = ForwardProgress(CPU)
    progress.layer_done(0)
    chunk = sending.chunk(progress=progress)
    sending.submit(chunk)
    wait_until(lambda: len(sending.channel("a").posted) == PARTS)
    if has_failed:
        progress.fail()
    else:
        chunk.cancel()
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


def test_a_chunk_that_was_cut_and_posted_again_may_linger(sending: Sending) -> None:
    channel = sending.channel("a")
    channel.attempts = 2
    channel.outcomes = [Outcome.CUT]
    chunk = sending.chunk()
    sent = sending.send(chunk)
    assert (sent.error, sent.lingering) == (None, True)
    sending.check_bytes(chunk)
    assert not sending.send(sending.chunk()).lingering


@pytest.mark.parametrize("broken", ["submit", "wait", "check", "connect", "ring", "route", "peer"])
def test_whatever_fails_each_chunk_is_reported_once(sending: Sending, broken: str) -> None:
    """The thread ended, and all that its decode node had here kept its pages for ever."""
    channel = sending.channel("a")
    channel.broken = broken
    channel.error = TransferError("the process has ended") if broken == "peer" else None
    connecting = {"connect": RuntimeError("a bug"), "route": NoRoute("no route")}
    sending.connecting_error = error = connecting.get(broken)
    sending.registering_is_broken = broken == "ring"
    chunks = [sending.chunk(start=start, stop=start + 100) for start in range(0, 300, 100)]
    for chunk in chunks:
        sending.submit(chunk)
    failed = [sending.reports.get(timeout=10) for _ in chunks]
    assert [sent.work for sent in failed] == [chunk.block.work for chunk in chunks]
    assert all(sent.error and str(error or channel.error or "") in sent.error for sent in failed)
    unknown = broken in ("submit", "wait")
    assert [sent.in_flight for sent in failed] == [unknown] * 3, "what may be in flight is never called quiet"
    sending.connecting_error, sending.registering_is_broken = None, False
    channel.broken, channel.error = "", None
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


def test_a_chunk_is_reported_while_the_next_one_waits_for_its_layer(sending: Sending) -> None:
    sending.submit(sending.chunk())
    waiting = sending.chunk(progress=ForwardProgress(CPU))
    sending.submit(waiting)
    assert sending.reports.get(timeout=10).error is None
    waiting.cancel()


def test_threads_end_when_no_request_needs_them_and_begin_again(sending: Sending) -> None:
    for boot in ("a", "b", "c"):
        assert sending.send(sending.chunk(boot, stop=1)).error is None
    sending.sender.keep_only({"c"})
    wait_until(lambda: sending.channel("a").closed and sending.channel("b").closed)
    assert not sending.channel("c").closed
    assert sending.send(sending.chunk("a", stop=1)).error is None
    assert sending.sender.stop(timeout=5)


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
