"""Whatever the pages, the slots and the partial last page: the runs move exactly the right bytes."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.planner import Descriptors, Runs, expand_extents, expand_pages, plan_runs


@dataclass
class Transfer:
    """One chunk of a request: positions [start, stop), and the destination slot of each position."""

    pages: np.ndarray
    page_size: int
    start: int
    stop: int
    all_slots: np.ndarray

    @property
    def slots(self) -> np.ndarray:
        return self.all_slots[self.start : self.stop]

    @property
    def runs(self) -> Runs:
        return plan_runs(expand_pages(self.pages, self.page_size, self.start, self.stop), self.slots)


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    page_size = draw(st.sampled_from([1, 2, 16, 64]))
    num_pages = draw(st.integers(1, 8))
    pages = np.array(draw(st.permutations(range(num_pages + 3)))[:num_pages], dtype=np.int64)
    stop = draw(st.integers(1, num_pages * page_size))
    start = draw(st.integers(0, stop))
    slots = np.arange(stop + 5, dtype=np.int64)
    if draw(st.booleans()):
        np.random.default_rng(draw(st.integers(0, 99))).shuffle(slots)
    return Transfer(pages, page_size, start, stop, slots[:stop])


@given(transfers(), st.sampled_from([1, 3, 8, 192]))
def test_runs_move_exactly_the_right_bytes(transfer: Transfer, item_bytes: int) -> None:
    pages, page_size, runs = transfer.pages, transfer.page_size, transfer.runs
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (int(pages.max()) + 1) * page_size * item_bytes, dtype=np.uint8)
    destination = np.zeros((int(transfer.all_slots.max()) + 1) * item_bytes, dtype=np.uint8)
    expected = destination.copy().reshape(-1, item_bytes)
    for position in range(transfer.start, transfer.stop):
        row = pages[position // page_size] * page_size + position % page_size
        expected[transfer.all_slots[position]] = source.reshape(-1, item_bytes)[row]

    for src, dst, length in zip(*runs.descriptors(item_bytes), strict=True):
        destination[dst : dst + length] = source[src : src + length]

    assert np.array_equal(destination.reshape(-1, item_bytes), expected)
    assert runs.num_items == transfer.stop - transfer.start


@given(transfers())
def test_no_two_neighbouring_runs_could_be_one(transfer: Transfer) -> None:
    runs = transfer.runs
    for i in range(len(runs) - 1):
        continues_source = runs.sources[i] + runs.lengths[i] == runs.sources[i + 1]
        continues_destination = runs.destinations[i] + runs.lengths[i] == runs.destinations[i + 1]
        assert not (continues_source and continues_destination)


@given(transfers(), st.integers(1, 9))
def test_split_runs_are_the_same_pairs_cut_after_every_so_many(transfer: Transfer, every: int) -> None:
    runs = transfer.runs
    parts = runs.split(every)
    assert [part.num_items for part in parts[:-1]] == [every] * (len(parts) - 1)
    assert parts[-1].num_items <= every
    assert [pair for part in parts for pair in pairs(part)] == pairs(runs)


@given(transfers(), st.sampled_from([1, 3, 192]), st.integers(1, 1000))
def test_cut_descriptors_move_the_same_bytes_in_the_fewest_pieces(
    transfer: Transfer, item_bytes: int, most_bytes: int
) -> None:
    runs = transfer.runs
    whole = runs.descriptors(item_bytes)
    cut = whole.cut(most_bytes)
    assert all(0 < length <= most_bytes for length in cut.lengths)
    assert len(cut.lengths) == sum(-(-length // most_bytes) for length in whole.lengths.tolist())
    assert [pair for piece in moved(cut) for pair in piece] == [pair for piece in moved(whole) for pair in piece]


def moved(descriptors: Descriptors) -> list[list[tuple[int, int]]]:
    """Source and destination of every byte, descriptor by descriptor."""
    return [
        [(source + at, destination + at) for at in range(length)]
        for source, destination, length in zip(*(column.tolist() for column in descriptors), strict=True)
    ]


@given(transfers())
def test_packed_runs_lead_to_the_same_slots_with_fewest_pieces(transfer: Transfer) -> None:
    runs = transfer.runs
    into, out = runs.pack()
    assert [packed for _, packed in pairs(into)] == list(range(runs.num_items))
    assert [packed for packed, _ in pairs(out)] == list(range(runs.num_items))
    through = [(source, slot) for (source, _), (_, slot) in zip(pairs(into), pairs(out), strict=True)]
    assert through == pairs(runs)
    assert len(out) == np.count_nonzero(np.diff(transfer.slots) != 1) + bool(runs.num_items)


@given(transfers())
def test_runs_in_order_of_destinations_are_the_same_pairs(transfer: Transfer) -> None:
    runs = transfer.runs
    ordered = pairs(runs.in_order_of_destinations())
    assert [slot for _, slot in ordered] == sorted(transfer.slots.tolist())
    assert sorted(ordered) == sorted(pairs(runs))


def pairs(runs: Runs) -> list[tuple[int, int]]:
    """Item by item."""
    columns = zip(runs.sources.tolist(), runs.destinations.tolist(), runs.lengths.tolist(), strict=True)
    return [(source + i, slot + i) for source, slot, length in columns for i in range(length)]


def test_base_addresses_above_two_to_the_47_survive() -> None:
    runs = plan_runs(np.array([1]), np.array([2]))
    assert runs.descriptors(1152).at(2**62, 2**62).destinations.tolist() == [2**62 + 2304]


def test_positions_outside_the_pages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"positions \[0, 65\) are not covered by 1 pages of 64"):
        expand_pages(np.array([0]), 64, 0, 65)


def test_unequal_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="2 source items for 1 destination slots"):
        plan_runs(np.array([1, 2]), np.array([1]))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 20)), max_size=8), st.none() | st.integers(0, 200))
def test_extents_expand_in_order_as_far_as_is_asked(extents: list[tuple[int, int]], num_positions: int | None) -> None:
    expected = [slot for start, length in extents for slot in range(start, start + length)]
    assert expand_extents(tuple(extents), num_positions).tolist() == expected[:num_positions]
