"""The slot allocator: nothing is given twice, nothing is lost, extents are few."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.extents import Extent, SlotAccountingError, SlotAllocator, expand

POOL = 48


def free_runs(allocator_references: list[int]) -> list[int]:
    """Lengths of the maximal runs of free slots."""
    return sorted(len(run) for run in "".join("." if r == 0 else "#" for r in allocator_references).split("#") if run)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "retain", "split"]), st.integers(0, 30))))
def test_slots_are_never_given_twice_and_never_lost(operations: list[tuple[str, int]]) -> None:
    allocator = SlotAllocator(POOL)
    references = [0] * POOL
    held: list[tuple[Extent, ...]] = []
    for operation, number in operations:
        if operation == "allocate":
            runs = free_runs(references)
            extents = allocator.allocate(number)
            if number > sum(runs):
                assert extents is None
                continue
            assert extents is not None
            slots = expand(extents).tolist()
            assert len(slots) == len(set(slots)) == number
            assert not any(references[slot] for slot in slots), "a held slot was given again"
            fewest, covered = 0, 0
            while covered < number:
                fewest += 1
                covered += runs[-fewest]
            assert len(extents) == fewest
            if fewest == 1:
                fitting = min(run for run in runs if run >= number)
                before, after = extents[0].start - 1, extents[0].stop
                while before >= 0 and references[before] == 0:
                    before -= 1
                while after < POOL and references[after] == 0:
                    after += 1
                assert after - before - 1 == fitting, "not the best fit"
            for slot in slots:
                references[slot] = 1
            held.append(extents)
        elif held:
            extents = held[number % len(held)]
            if operation == "retain":
                allocator.retain(extents)
                held.append(extents)
                for slot in expand(extents):
                    references[slot] += 1
            elif operation == "split" and extents and extents[0].length > 1:
                held.remove(extents)
                first = extents[0]
                held += [(Extent(first.start, 1),), (Extent(first.start + 1, first.length - 1), *extents[1:])]
            elif operation == "release":
                held.remove(extents)
                allocator.release(extents)
                for slot in expand(extents):
                    references[slot] -= 1
        assert allocator.free == references.count(0)
        assert allocator.used == POOL - allocator.free
        allocator.check_integrity()
    for extents in held:
        allocator.release(extents)
    assert allocator.allocate(POOL) == (Extent(0, POOL),), "all free slots must have coalesced"


@pytest.mark.parametrize("operation", ["release", "retain"])
def test_a_free_slot_cannot_be_released_or_retained(operation: str) -> None:
    allocator = SlotAllocator(8)
    allocator.allocate(4)
    with pytest.raises(SlotAccountingError, match="slot 4 is free"):
        getattr(allocator, operation)([Extent(2, 3)])
    with pytest.raises(ValueError, match="not within"):
        getattr(allocator, operation)([Extent(6, 3)])


def test_millions_of_slots_cost_no_loop_over_slots() -> None:
    allocator = SlotAllocator(4_000_000)
    extents = allocator.allocate(3_999_999)
    assert extents is not None
    allocator.release(extents)
    assert allocator.free == 4_000_000


def test_what_the_books_have_wrong_is_found() -> None:
    allocator = SlotAllocator(8)
    allocator.allocate(4)
    tables: list[dict[int, Any]] = [allocator._length_at, allocator._start_before, allocator._starts_of[4]]
    for table in tables:
        kept = table.copy()
        table.clear()
        with pytest.raises(SlotAccountingError, match="4 unreferenced in 1, 4 counted as free"):
            allocator.check_integrity()
        table.update(kept)
    allocator.check_integrity()
    allocator._references[5] = 1
    with pytest.raises(SlotAccountingError, match="4 slots in 1 free extents, 3 unreferenced in 2"):
        allocator.check_integrity()
