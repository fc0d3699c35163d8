"""Verification beside the loop: of real memory, in order, bounded, and over when it says so."""

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from decode_node.verifier import Verification, Verifier
from kvcache.extents import Extent, HostSlots, expand
from tests.decode_node.remote_world import attempt_to_fill
from tests.transfer.world import slot_digest
from transfer.checksum import Mismatch, verify
from transfer.memory import BufferInfo, Checksum, Checksums
from transfer.planner import Int64s

SLOTS = HostSlots((Extent(6, 2), Extent(1, 3)))


class Verifying:
    """Two buffers of 16 items, what an honest sender says of the five tokens at SLOTS, and a verifier of that memory.

    The verifier has room for two tasks in addition to the one under way.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.items = [rng.integers(0, 256, (16, size), dtype=np.uint8) for size in (24, 8)]
        self.buffers = BufferInfo(
            ptrs=tuple(items.ctypes.data for items in self.items),
            lengths=tuple(items.nbytes for items in self.items),
            item_lengths=(24, 8),
        )
        self.checksums = Checksums.of(
            [
                Checksum(buffer=buffer, start=0, stop=5, digest=slot_digest(self.buffers, buffer, SLOTS.slots()))
                for buffer in (0, 1)
            ]
        )

        self.reports: queue.Queue[Verification] = queue.Queue()
        self.verifier = Verifier(self.buffers, self.reports.put, max_waiting=2)

    def verification(self, epoch: int = 1) -> Verification:
        return Verification(attempt_to_fill(SLOTS, 5, epoch), None, self.checksums)

    def submit(self, task: Verification) -> bool:
        return self.verifier.submit(task)

    def result(self) -> Verification:
        return self.reports.get(timeout=10)


class Held:
    """Stands before each verification until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

        def held(*arguments: object, **options: object) -> list[Mismatch]:
            self.begun.set()
            assert self.go.wait(10)
            return verify(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr("decode_node.verifier.verify", held)


@pytest.fixture
def v() -> Iterator[Verifying]:
    made = Verifying()
    yield made
    made.verifier.close()


def test_what_is_in_memory_decides(v: Verifying) -> None:
    v.submit(v.verification(1))
    assert v.result().failure_reason is None
    v.items[1][2, 3] ^= 1
    v.submit(v.verification(2))
    verified = v.result()
    assert (verified.attempt.id.epoch, verified.failure_reason) == (2, "1 of 2 checksums do not match")
    [example] = verified.examples()
    address = v.buffers.ptrs[1]
    assert example.startswith("buffer 1, positions [0, 5): ")
    assert example.endswith(f"at {address + 6 * 8:#x}+16, {address + 8:#x}+24")


def test_an_error_is_reported_and_costs_only_its_request(v: Verifying) -> None:
    beyond = HostSlots((Extent(15, 5),))
    v.submit(Verification(attempt_to_fill(beyond, 5), None, v.checksums))
    v.submit(v.verification(2))
    failed, fine = v.result(), v.result()
    assert failed.failure_reason is not None
    assert "slots 15 to 19 are not within [0, 16)" in failed.failure_reason
    assert fine.failure_reason is None


def test_results_name_their_part_and_parts_share_their_slots(v: Verifying, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded: list[HostSlots] = []

    def counted(slots: HostSlots) -> Int64s:
        expanded.append(slots)
        return expand(slots.extents)

    monkeypatch.setattr(HostSlots, "slots", counted)
    attempt = attempt_to_fill(SLOTS, 5)
    v.items[1][2, 3] ^= 1
    right, wrong = v.checksums.rows()
    for part, row in ((0, right), (1, wrong), (None, right)):
        v.submit(Verification(attempt, part, Checksums.of([row])))
        verified = v.result()
        assert (verified.chunk, len(verified.mismatches)) == (part, row is wrong)
    assert expanded == [SLOTS]


def test_the_queue_is_bounded(v: Verifying, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    assert v.submit(v.verification(1))
    assert held.begun.wait(10)
    assert [v.submit(v.verification(epoch)) for epoch in (2, 3, 4)] == [True, True, False]
    held.go.set()
    assert [v.result().attempt.id.epoch for _ in range(3)] == [1, 2, 3]
    assert v.submit(v.verification(5))
    assert v.result().attempt.id.epoch == 5


def test_after_closing_no_memory_is_read_and_nothing_reported(v: Verifying, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    for epoch in (1, 2, 3):
        v.submit(v.verification(epoch))
        held.begun.wait(10)
    closing = threading.Thread(target=v.verifier.close)
    closing.start()
    assert v.reports.empty()
    closing.join(0.05)
    assert closing.is_alive(), "it waits for the one that is under way"
    held.go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert not v.verifier._thread.is_alive()
    assert v.reports.empty()


def test_what_is_logged_of_many_mismatches_is_bounded() -> None:
    scattered = tuple((address, 8) for address in range(0, 8000, 16))
    many = tuple(Mismatch(Checksum(buffer, 0, 500, 1), 2, scattered) for buffer in range(100))
    verified = Verification(attempt_to_fill(SLOTS, 5), None, Checksums.of([each.checksum for each in many] * 2), many)
    assert verified.failure_reason == "100 of 200 checksums do not match"
    examples = verified.examples()
    assert len(examples) == 4
    assert all(len(example) < 200 and example.endswith("and 496 more") for example in examples)
    outside = Verification(attempt_to_fill(SLOTS, 5), None, Checksums(), (Mismatch(Checksum(99, 0, 5, 1)),))
    assert outside.examples() == ["buffer 99, positions [0, 5): there is no such thing"]
