"""The simulation: allocators keep their books, and ours keeps prompts in far fewer pieces."""

import pytest

from benchmarks.fragmentation.allocators import ALLOCATORS, Allocator, FirstFit, SlotStack
from benchmarks.fragmentation.churn import Kind, Load, trace
from benchmarks.fragmentation.simulation import simulate

LOAD = Load(num_slots=1 << 17, occupancy=0.85, hours=1.0, seed=3)


def test_a_trace_keeps_within_the_pool_and_releases_what_was_reserved() -> None:
    held: dict[int, int] = {}
    fullest = 0
    for event in trace(LOAD):
        if event.kind is Kind.RELEASE:
            del held[event.request]
        else:
            assert (event.request in held) == (event.kind is Kind.GROW)
            held[event.request] = held.get(event.request, 0) + event.count
        fullest = max(fullest, sum(held.values()))
    assert 0.8 * LOAD.num_slots < fullest <= LOAD.num_slots


@pytest.mark.parametrize("kind", [SlotStack, FirstFit])
def test_plain_allocators_hand_out_no_slot_twice_and_take_all_back(kind: type[SlotStack] | type[FirstFit]) -> None:
    allocator: Allocator = kind(100)
    first, second, third = allocator.reserve(30), allocator.reserve(30), allocator.reserve(40)
    allocator.release(first)
    allocator.release(third)
    first = allocator.grow(allocator.reserve(10), 45)
    taken = [slot for holding in (first, second) for slot in slots(holding)]
    assert len(taken) == len(set(taken)) == 85
    allocator.release(first)
    allocator.release(second)
    assert sorted(slots(allocator.reserve(100))) == list(range(100))


def slots(holding: object) -> list[int]:
    if isinstance(holding, list):
        return [slot for start, length in holding for slot in range(start, start + length)]
    return list(holding)  # type: ignore[call-overload, no-any-return]


def test_ours_needs_far_fewer_extents_after_churn() -> None:
    outcomes = simulate(LOAD)
    means = {outcome.allocator: outcome.last_hour.extents.mean() for outcome in outcomes}
    assert set(means) == set(ALLOCATORS)
    assert means["ours"] * 2 < means["first fit"]
    assert means["ours"] * 50 < means["stack of slots"]
    first, *others = (outcome.reservations.tokens.tolist() for outcome in outcomes)
    assert all(tokens == first for tokens in others), "every allocator is asked the same"
