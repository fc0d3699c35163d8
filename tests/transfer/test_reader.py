"""Reads of another process's memory, over real Mooncake and a mapping: what was asked for lands, and then nothing."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.transfer.test_lingering import Process, start_engine, wait_until
from tests.transfer.test_transports import Owner
from tests.transfer.world import descriptors
from transfer.incoming import IncomingCut
from transfer.planner import Descriptors
from transfer.shm import SharedMemoryChannel
from transfer.writer import Outcome, Pipeline, Write

SIZE = 4 << 20
CONTENT = np.random.default_rng(0).integers(1, 256, SIZE, dtype=np.uint8)


@dataclass(frozen=True)
class ReadReport:
    num_bytes: int
    num_descriptors: int
    error: str | None
    in_flight: bool


def read(pipeline: Pipeline, batches: Iterable[Descriptors], may_post: Callable[[], bool] = lambda: True) -> ReadReport:
    write = Write(on_end=lambda: None, go_on=may_post, kind="read")
    for batch in batches:
        if not pipeline.post(write, batch.cut(pipeline.channel.max_bytes)):
            break
    pipeline.close(write)
    pipeline.drain()
    in_flight = write.outcome is Outcome.UNKNOWN
    return ReadReport(write.num_bytes, write.num_descriptors, pipeline.failure_reason(write), in_flight)


class Serving:
    """What the process does that is read."""

    def __init__(self, host: str) -> None:
        self.engine, self.buffer = start_engine(host)
        self.buffer[:] = CONTENT

    def where(self) -> tuple[Any, int]:
        return self.engine.session, self.buffer.ctypes.data

    def cut(self) -> None:
        wait_until(IncomingCut(self.engine.fenced_ports).passed)


class Remote:
    """A process that serves, and a reader of it into `here`."""

    def __init__(self) -> None:
        self.process = Process(Serving, "127.0.0.1")  # type: ignore[arg-type]
        session, self.address = self.process.do("where")
        self.engine, self.here = start_engine("127.0.0.1")
        self.pipeline = Pipeline(self.engine.channel(session, reading=True))

    def batch(self, pieces: list[tuple[int, int, int]]) -> Descriptors:
        return descriptors(self.address, self.here.ctypes.data, pieces)

    def read(self, pieces: list[tuple[int, int, int]]) -> ReadReport:
        return read(self.pipeline, [self.batch(pieces)])


@pytest.fixture(scope="module")
def serving() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.process.end()


@pytest.fixture
def remote(serving: Remote) -> Remote:
    serving.here[:] = 0
    return serving


def test_scattered_pieces_land_and_a_refusal_costs_nothing_else(remote: Remote) -> None:
    order = np.random.default_rng(1).permutation(3000).tolist()
    report = remote.read([(i * 64, j * 64, 64) for i, j in enumerate(order)])
    assert (report.error, report.num_bytes, report.num_descriptors) == (None, 3000 * 64, 3000)
    expected = np.zeros(SIZE, dtype=np.uint8)
    expected[: 3000 * 64].reshape(3000, 64)[order] = CONTENT[: 3000 * 64].reshape(3000, 64)
    assert np.array_equal(remote.here, expected)

    beyond = remote.read([(SIZE - 10, 0, 4096)])
    assert beyond.error is not None
    assert not beyond.in_flight

    whole = remote.read([(0, 0, SIZE)])
    assert (whole.error, whole.num_descriptors) == (None, 4), "no descriptor is longer than the transport likes"
    assert np.array_equal(remote.here, CONTENT)


def test_what_was_cut_is_posted_again_and_lands(remote: Remote) -> None:
    """A fence of the decode node closes all connections to its data port, those of readers too."""
    asked = 0

    def may_post() -> bool:
        nonlocal asked
        asked += 1
        if asked in (40, 80):
            remote.process.ask("cut")
        return True

    rounds = 150
    report = read(remote.pipeline, [remote.batch([(0, 0, SIZE)])] * rounds, may_post)
    assert report.error is None
    assert asked > rounds, "some were posted again"
    assert np.array_equal(remote.here, CONTENT)


@pytest.mark.slow
def test_a_dead_process_is_an_error() -> None:
    remote = Remote()
    assert remote.read([(0, 0, 64)]).error is None
    remote.process.end()
    report = remote.read([(0, 0, SIZE)])
    assert report.error is not None
    assert not report.in_flight


class Reading:
    """A process that reads, for a test that wants an impatient Mooncake."""

    def __init__(self, host: str) -> None:
        self.engine, self.buffer = start_engine(host)
        self.num_read = 0
        self.error: str | None = None
        self.thread: threading.Thread | None = None

    def begin(self, session: Any, address: int) -> None:
        """Read again and again until a read fails, on a thread; then use the memory for something else at once."""
        pipeline = Pipeline(self.engine.channel(session, reading=True))
        everything = descriptors(address, self.buffer.ctypes.data, [(0, 0, SIZE)])

        def read_until_failure() -> None:
            while (error := read(pipeline, [everything]).error) is None:
                self.num_read += 1
            self.buffer[:] = 0
            self.error = error

        self.thread = threading.Thread(target=read_until_failure, daemon=True)
        self.thread.start()

    def has_read(self) -> int:
        """How often."""
        return self.num_read

    def failure(self) -> str | None:
        """What failed at last; waits for that, at most a minute."""
        assert self.thread is not None
        self.thread.join(60)
        return self.error

    def is_untouched(self) -> bool:
        return not self.buffer.any()


@pytest.mark.slow
def test_a_read_that_was_given_up_does_not_land_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike a write: what the network still holds has nowhere to go."""
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "2")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")
    serving, reading = Process(Serving, "127.0.0.1"), Process(Reading, "127.0.0.1")  # type: ignore[arg-type]
    try:
        session, address = serving.do("where")
        reading.do("begin", session, address)
        wait_until(lambda: reading.do("has_read") > 0)
        serving.stop()
        assert reading.do("failure") == "the transport gave a read up"
        serving.go_on()
        serving.do("where")
        time.sleep(1.0)  # for nothing to happen
        assert reading.do("is_untouched")
    finally:
        serving.end()
        reading.end()


def test_a_mapping_is_read_within_its_bounds_and_while_its_owner_lives() -> None:
    owner = Owner(SIZE, seed=0)
    memory = owner.memory
    pipeline = Pipeline(SharedMemoryChannel(memory, reading=True))
    here = np.zeros(SIZE, dtype=np.uint8)
    order = np.random.default_rng(2).permutation(SIZE // 1000).tolist()
    pieces = [(i * 1000 + 3, j * 1000, 997) for i, j in enumerate(order)]
    assert read(pipeline, [descriptors(memory.base, here.ctypes.data, pieces)]).error is None
    expected = np.zeros(SIZE, dtype=np.uint8)
    for there, to, count in pieces:
        expected[to : to + count] = CONTENT[there : there + count]
    assert np.array_equal(here, expected)
    for outside in (-1, memory.length - 10):
        report = read(pipeline, [descriptors(memory.base, here.ctypes.data, [(outside, 0, 64)])])
        assert report.error == "the other process cannot be reached or refuses a read"
    assert np.array_equal(here, expected)
    owner.kill()
    late = read(pipeline, [descriptors(memory.base, here.ctypes.data, [(0, 0, 64)])])
    assert late.error == "the process that owns the memory has ended"
    pipeline.channel.close()
