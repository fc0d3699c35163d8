"""Copies of scattered pieces: every byte of them, and no other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.copy_runs import JointCopy, all_within, copy_runs, stream_runs
from transfer.planner import Descriptors


def copy_together(batch: Descriptors) -> None:
    """By three threads, to addresses that lie 48 bytes further on here."""
    copy = JointCopy(batch._replace(destinations=batch.destinations - 48), shift=48)
    with ThreadPoolExecutor(2) as helpers:
        for _ in range(2):
            helpers.submit(copy.help)
        copy.finish()


every = pytest.mark.parametrize("copy", [copy_runs, stream_runs, copy_together])
pieces = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300) | st.integers(1000, 5000)), max_size=100)


@every
@given(pieces)
def test_pieces_of_any_length_at_any_alignment_arrive_and_what_is_between_them_stays(
    copy: Callable[[Descriptors], None], pieces: list[tuple[int, int]]
) -> None:
    """pieces: (bytes before it, its length)."""
    gaps, lengths = np.asarray(pieces, dtype=np.int64).reshape(-1, 2).T
    ends = np.cumsum(gaps + lengths)
    total = int(ends[-1]) + 64 if len(ends) else 64
    places = ends - lengths
    elsewhere = np.random.default_rng(total).permutation(len(places))

    source = np.random.default_rng(total).integers(0, 256, total, dtype=np.uint8)
    destination = np.zeros(total, dtype=np.uint8)
    expected = destination.copy()
    for at, length in zip(places.tolist(), lengths.tolist(), strict=True):
        expected[at : at + length] = source[total - at - length : total - at]

    copy(
        Descriptors(
            source.ctypes.data + total - places[elsewhere] - lengths[elsewhere],
            destination.ctypes.data + places[elsewhere],
            lengths[elsewhere],
        )
    )

    np.testing.assert_array_equal(destination, expected)


@every
def test_nothing_to_copy(copy: Callable[[Descriptors], None]) -> None:
    empty = np.empty(0, dtype=np.int64)
    copy(Descriptors(empty, empty, empty))


def test_when_a_copy_is_finished_what_others_took_of_it_is_there_too() -> None:
    rng = np.random.default_rng(0)
    with ThreadPoolExecutor(3) as helpers:
        for _ in range(200):
            source = rng.integers(0, 256, 500 * 100, dtype=np.uint8)
            destination = np.zeros_like(source)
            starts = rng.permutation(500) * 100
            copy = JointCopy(
                Descriptors(source.ctypes.data + starts, destination.ctypes.data + starts, np.full(500, 100)), shift=0
            )
            late = [helpers.submit(copy.help) for _ in range(3)]
            copy.finish()
            np.testing.assert_array_equal(destination, source)
            wait(late)
            copy.finish()


@pytest.mark.parametrize(
    ("start", "length", "within"),
    [(0, 10, True), (90, 10, True), (100, 0, True), (91, 10, False), (-1, 5, False), (0, 101, False)],
)
def test_destinations_within_a_piece_of_memory(start: int, length: int, within: bool) -> None:
    batch = Descriptors(*np.array([(0, 1000, 10), (0, 1000 + start, length)], dtype=np.int64).T)
    assert all_within(batch, 1000, 100) is within
