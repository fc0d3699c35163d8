"""Checksums: equal for equal bytes however they are scattered, and never for others."""

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.world import slot_digest
from transfer.checksum import SAMPLE_POSITIONS, Mismatch, item_ranges, sampled, verify
from transfer.choices import ChecksumMode
from transfer.memory import BufferInfo, Checksum
from transfer.planner import Int64s

NUM_SLOTS = 48
ITEMS = (5, 16, 3)


class Pool:
    """Buffers of random bytes with items of different sizes."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.memory = [rng.integers(0, 256, (NUM_SLOTS, item), dtype=np.uint8) for item in ITEMS]
        self.info = BufferInfo(
            ptrs=tuple(memory.ctypes.data for memory in self.memory),
            lengths=tuple(memory.nbytes for memory in self.memory),
            item_lengths=ITEMS,
        )

    def checksums(self, mode: ChecksumMode, slots: Int64s, pieces: list[tuple[int, int]]) -> tuple[Checksum, ...]:
        """What a sender says of items that lie at these slots, piece by piece."""
        made = []
        for buffer in range(len(ITEMS)):
            for start, stop in pieces:
                if chosen := sampled(mode, start, stop, buffer):
                    first, last = chosen
                    found = slot_digest(self.info, buffer, slots[first:last])
                    made.append(Checksum(buffer=buffer, start=first, stop=last, digest=found))
        return tuple(made)


@dataclass
class Transfer:
    """Items at `sources` of one pool, which also lie at `slots` of another."""

    source: Pool
    target: Pool
    sources: Int64s
    slots: Int64s
    pieces: list[tuple[int, int]]


@st.composite
def scattered(draw: st.DrawFn, num_tokens: int) -> Int64s:
    """Slots for so many tokens in a few extents, in any order."""
    free = list(range(NUM_SLOTS))
    slots: list[int] = []
    while len(slots) < num_tokens:
        start = draw(st.sampled_from(free))
        for slot in range(start, start + draw(st.integers(1, 12))):
            if slot in free and len(slots) < num_tokens:
                free.remove(slot)
                slots.append(slot)
    return np.array(slots, dtype=np.int64)


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    num_tokens = draw(st.integers(1, 40))
    source, target = Pool(1), Pool(2)
    sources, slots = draw(scattered(num_tokens)), draw(scattered(num_tokens))
    for ours, theirs in zip(source.memory, target.memory, strict=True):
        theirs[slots] = ours[sources]
    size = draw(st.integers(1, 40))
    pieces = [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
    return Transfer(source, target, sources, slots, pieces)


@given(transfers(), st.sampled_from(["sample", "full"]))
def test_what_arrived_as_it_was_sent_is_accepted_however_either_side_lies(t: Transfer, mode: ChecksumMode) -> None:
    checksums = t.source.checksums(mode, t.sources, t.pieces)
    assert len(checksums) == len(ITEMS) * len(t.pieces)
    assert verify(checksums, t.target.info, t.slots, len(t.slots)) == []


@given(transfers(), st.sampled_from(["sample", "full"]), st.data())
def test_any_flipped_byte_that_is_covered_is_found(t: Transfer, mode: ChecksumMode, data: st.DataObject) -> None:
    checksums = t.source.checksums(mode, t.sources, t.pieces)
    covered = data.draw(st.sampled_from(checksums))
    position = data.draw(st.integers(covered.start, covered.stop - 1))
    byte = data.draw(st.integers(0, ITEMS[covered.buffer] - 1))
    t.target.memory[covered.buffer][t.slots[position], byte] ^= 1 << data.draw(st.integers(0, 7))
    [mismatch] = verify(checksums, t.target.info, t.slots, len(t.slots))
    assert mismatch.checksum == covered
    assert mismatch.found != covered.digest
    memory = b"".join(ctypes.string_at(address, length) for address, length in mismatch.ranges)
    assert memory == t.target.memory[covered.buffer][t.slots[covered.start : covered.stop]].tobytes()


@given(transfers())
def test_items_in_another_order_are_not_the_same(t: Transfer) -> None:
    checksums = t.source.checksums("full", t.sources, [(0, len(t.sources))])
    found = verify(checksums, t.target.info, t.slots[::-1].copy(), len(t.slots))
    same = [np.array_equal(memory[t.slots], memory[t.slots[::-1]]) for memory in t.target.memory]
    assert [mismatch.checksum.buffer for mismatch in found] == [
        buffer for buffer, equal in enumerate(same) if not equal
    ]


def test_neighbouring_slots_are_one_range() -> None:
    buffers = BufferInfo(ptrs=(1000, 5000), lengths=(100, 200), item_lengths=(10, 20))
    slots = np.array([3, 4, 5, 0, 1, 9], dtype=np.int64)
    assert item_ranges(buffers, 1, slots) == [(5060, 60), (5000, 40), (5180, 20)]
    assert item_ranges(buffers, 0, slots[:0]) == []


@pytest.mark.parametrize(
    ("buffer", "start", "stop"), [(3, 0, 4), (2**62, 0, 4), (0, 0, 11), (0, 2**62, 2**63 - 1), (0, 4, 4), (0, 4, 2)]
)
def test_a_checksum_of_what_is_not_there_is_a_mismatch(buffer: int, start: int, stop: int) -> None:
    """Ten of twelve slots hold tokens; a sender that speaks of more is wrong, and no memory is read for it."""
    checksum = Checksum(buffer=buffer, start=start, stop=stop, digest=7)
    found = verify((checksum,), Pool(1).info, np.arange(12), num_tokens=10)
    assert found == [Mismatch(checksum)]


def test_slots_outside_the_buffers_are_our_own_error_and_are_not_read() -> None:
    for slots in (np.array([NUM_SLOTS]), np.array([-1]), np.arange(2)):
        with pytest.raises(ValueError, match="slots"):
            verify((), Pool(1).info, slots, num_tokens=1 if len(slots) == 1 else 3)


def test_off_looks_at_nothing_and_full_at_everything() -> None:
    assert sampled("off", 0, 100, 0) is None
    assert sampled("full", 5, 105, 0) == (5, 105)
    assert sampled("full", 5, 5, 0) is None


@given(st.integers(0, 2**40), st.integers(1, 2000), st.integers(0, 200))
def test_a_sample_is_a_few_neighbours_within_its_piece(start: int, length: int, buffer: int) -> None:
    chosen = sampled("sample", start, start + length, buffer)
    assert chosen is not None
    first, last = chosen
    assert start <= first < last <= start + length
    assert last - first == min(length, SAMPLE_POSITIONS)
    assert chosen == sampled("sample", start, start + length, buffer)


@pytest.mark.parametrize("length", [9, 64, 512, 1024])
def test_over_many_pieces_every_offset_is_sampled(length: int) -> None:
    offsets = set()
    for piece in range(200):
        for buffer in range(61):
            chosen = sampled("sample", piece * length, (piece + 1) * length, buffer)
            assert chosen is not None
            offsets.add(chosen[0] - piece * length)
    assert offsets == set(range(length - SAMPLE_POSITIONS + 1))
