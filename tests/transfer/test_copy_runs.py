"""Copies of scattered pieces: every byte of them, and no other."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.copy_runs import copy_runs, stream_runs
from transfer.planner import Descriptors

both = pytest.mark.parametrize("copy", [copy_runs, stream_runs])
pieces = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300) | st.integers(1000, 5000)), max_size=20)


@both
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


@both
def test_nothing_to_copy(copy: Callable[[Descriptors], None]) -> None:
    empty = np.empty(0, dtype=np.int64)
    copy(Descriptors(empty, empty, empty))
