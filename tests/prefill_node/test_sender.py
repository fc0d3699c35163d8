"""Chunks leave in order, after the device has written them, and not after they were given up."""

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest

from prefill_node.sender import Chunk, Sender, Sent
from tests.transfer.test_messages import IDENTITY
from transfer.engine import TransferAborted, TransferError
from transfer.messages import BufferInfo, Destination
from transfer.planner import Descriptors

SOURCE = BufferInfo(ptrs=(1000, 5000), lengths=(640, 320), item_lengths=(10, 5))


class RecordingEngine:
    """Notes every write; `hold` blocks those of a session."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, Descriptors]] = []
        self.hold: dict[str, threading.Event] = {}
        self.error: Exception | None = None

    def write(self, session: str, batch: Descriptors, go_on: Callable[[], bool]) -> None:
        if session in self.hold:
            self.hold[session].wait(10)
        if self.error is not None:
            raise self.error
        if not go_on():
            raise TransferAborted(session)
        self.writes.append((session, batch))


class DeviceEvent:
    """An event of a device that has not finished yet."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        self.done.wait(10)


def chunk(session: str = "a:1", start: int = 0, stop: int = 4, **changes: object) -> Chunk:
    fields: dict[str, object] = {
        "request_id": "r",
        "epoch": 1,
        "start": start,
        "stop": stop,
        "pages": np.array([2, 0], dtype=np.int64),
        "slots": np.arange(10, 18, dtype=np.int64),
        "destination": Destination(
            session=session,
            protocol="tcp",
            identity=IDENTITY,
            buffers=BufferInfo(ptrs=(10**6, 2 * 10**6), lengths=(400, 200), item_lengths=(10, 5)),
        ),
        "ready": None,
        "cancelled": lambda: False,
    }
    return Chunk(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def sending() -> tuple[Sender, RecordingEngine, "queue.SimpleQueue[Sent]"]:
    engine = RecordingEngine()
    reports: queue.SimpleQueue[Sent] = queue.SimpleQueue()
    return Sender(engine, SOURCE, page_size=4, report=reports.put), engine, reports  # type: ignore[arg-type]


Sending = tuple[Sender, RecordingEngine, "queue.SimpleQueue[Sent]"]


def test_every_layer_gets_the_same_runs_at_its_own_addresses(sending: Sending) -> None:
    sender, engine, reports = sending
    sender.submit(chunk(start=2, stop=7))
    sent = reports.get(timeout=5)
    assert (sent.num_bytes, sent.num_descriptors, sent.error) == (5 * 15, 4, None)
    [(session, batch)] = engine.writes
    assert session == "a:1"
    # Positions 2, 3 are in page 2, positions 4..6 in page 0.
    assert batch.sources.tolist() == [1000 + 100, 1000 + 0, 5000 + 50, 5000 + 0]
    assert batch.destinations.tolist() == [10**6 + 120, 10**6 + 140, 2 * 10**6 + 60, 2 * 10**6 + 70]
    assert batch.lengths.tolist() == [20, 30, 10, 15]


def test_no_write_is_posted_before_the_device_event_of_its_chunk(sending: Sending) -> None:
    """sglang PR 30254: the NIC read KV that the compute stream had not finished writing."""
    sender, engine, reports = sending
    event = DeviceEvent()
    sender.submit(chunk(ready=event))
    sender.submit(chunk(session="b:2"))
    reports.get(timeout=5)
    assert [session for session, _ in engine.writes] == ["b:2"]
    event.done.set()
    reports.get(timeout=5)
    assert [session for session, _ in engine.writes] == ["b:2", "a:1"]


def test_a_slow_receiver_delays_only_its_own_requests(sending: Sending) -> None:
    sender, engine, reports = sending
    engine.hold["slow:1"] = threading.Event()
    sender.submit(chunk(session="slow:1"))
    for _ in range(3):
        sender.submit(chunk(session="fast:1"))
        assert reports.get(timeout=5).chunk.destination.session == "fast:1"
    engine.hold["slow:1"].set()
    assert reports.get(timeout=5).chunk.destination.session == "slow:1"


def test_a_chunk_that_was_given_up_is_not_posted(sending: Sending) -> None:
    sender, engine, reports = sending
    sender.submit(chunk(cancelled=lambda: True))
    assert reports.get(timeout=5).error == "aborted"
    assert engine.writes == []


def test_a_failed_write_is_reported_and_the_next_one_goes_out(sending: Sending) -> None:
    """sglang 13054: one transient error marked a healthy pair as failed for ever."""
    sender, engine, reports = sending
    engine.error = TransferError("lost")
    sender.submit(chunk())
    assert reports.get(timeout=5).error == "lost"
    engine.error = None
    sender.submit(chunk())
    assert reports.get(timeout=5).error is None


def test_threads_of_sessions_that_are_over_end(sending: Sending) -> None:
    sender, _, reports = sending
    sender.submit(chunk(session="a:1"))
    reports.get(timeout=5)
    sender.keep_only(set())
    sender.submit(chunk(session="a:1"))
    assert reports.get(timeout=5).error is None
    assert sender.stop(timeout=5)
