"""Verification beside the loop: of real memory, in order, bounded, and over when it says so."""

import queue
import threading

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


class Memory:
    """Two buffers of 16 items, and what an honest sender says of the five tokens at SLOTS."""

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

    def verification(self, epoch: int = 1) -> Verification:
        return Verification(attempt_to_fill(SLOTS, 5, epoch), None, self.checksums)


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
def reports() -> "queue.Queue[Verification]":
    return queue.Queue()


def test_what_is_in_memory_decides(reports: "queue.Queue[Verification]") -> None:
    memory = Memory()
    verifier = Verifier(memory.buffers, reports.put)
    verifier.submit(memory.verification(1))
    assert reports.get(timeout=10).failure_reason is None
    memory.items[1][2, 3] ^= 1
    verifier.submit(memory.verification(2))
    verified = reports.get(timeout=10)
    assert (verified.attempt.id.epoch, verified.failure_reason) == (2, "1 of 2 checksums do not match")
    [example] = verified.examples()
    address = memory.buffers.ptrs[1]
    assert example.startswith("buffer 1, positions [0, 5): ")
    assert example.endswith(f"at {address + 6 * 8:#x}+16, {address + 8:#x}+24")
    verifier.close()


def test_an_error_is_reported_and_costs_only_its_request(reports: "queue.Queue[Verification]") -> None:
    memory = Memory()
    verifier = Verifier(memory.buffers, reports.put)
    beyond = HostSlots((Extent(15, 5),))
    verifier.submit(Verification(attempt_to_fill(beyond, 5), None, memory.checksums))
    verifier.submit(memory.verification(2))
    failed, fine = reports.get(timeout=10), reports.get(timeout=10)
    assert failed.failure_reason is not None
    assert "slots 15 to 19 are not within [0, 16)" in failed.failure_reason
    assert fine.failure_reason is None
    verifier.close()


def test_a_result_says_which_part_it_is_about_and_parts_share_what_is_known_of_their_slots(
    reports: "queue.Queue[Verification]", monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    expanded: list[HostSlots] = []

    def counted(slots: HostSlots) -> Int64s:
        expanded.append(slots)
        return expand(slots.extents)

    monkeypatch.setattr(HostSlots, "slots", counted)
    attempt = attempt_to_fill(SLOTS, 5)
    memory.items[1][2, 3] ^= 1
    verifier = Verifier(memory.buffers, reports.put)
    rows = list(memory.checksums.rows())
    for part, row in ((0, rows[0]), (1, rows[1]), (None, rows[0])):
        verifier.submit(Verification(attempt, part, Checksums.of([row])))
    found = [reports.get(timeout=10) for _ in range(3)]
    assert [(verified.chunk, len(verified.mismatches)) for verified in found] == [(0, 0), (1, 1), (None, 0)]
    assert expanded == [SLOTS]
    verifier.close()


def test_the_queue_is_bounded(reports: "queue.Queue[Verification]", monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    memory = Memory()
    verifier = Verifier(memory.buffers, reports.put, max_waiting=2)
    assert verifier.submit(memory.verification(1))
    assert held.begun.wait(10)
    assert [verifier.submit(memory.verification(epoch)) for epoch in (2, 3, 4)] == [True, True, False]
    held.go.set()
    assert [reports.get(timeout=10).attempt.id.epoch for _ in range(3)] == [1, 2, 3]
    assert verifier.submit(memory.verification(5))
    assert reports.get(timeout=10).attempt.id.epoch == 5
    verifier.close()


def test_after_closing_no_memory_is_read_and_nothing_reported(
    reports: "queue.Queue[Verification]", monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    memory = Memory()
    verifier = Verifier(memory.buffers, reports.put, max_waiting=2)
    for epoch in (1, 2, 3):
        verifier.submit(memory.verification(epoch))
        held.begun.wait(10)
    closing = threading.Thread(target=verifier.close)
    closing.start()
    assert reports.empty()
    closing.join(0.05)
    assert closing.is_alive(), "it waits for the one that is under way"
    held.go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert not verifier._thread.is_alive()
    assert reports.empty()


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
