"""What is read of a prefix at once, and by which rank."""

from itertools import pairwise

import numpy as np
import pytest

from prefill_node.division import checksums_of_blocks, cut, divide
from prefill_node.fetch import WrongGrant, pieces
from tests.identity import IDENTITY
from tests.prefill_node.fakes import LAYOUT
from tests.prefill_node.world import UNTOUCHED, Slots
from transfer.checksum import GROUP_POSITIONS, digests
from transfer.memory import Checksum, Checksums
from transfer.planner import expand_extents


def checksums(*groups: tuple[int, int, int]) -> Checksums:
    """groups: (buffer, start, stop)."""
    return Checksums.of([Checksum(buffer, start, stop, 0) for buffer, start, stop in groups])


def test_groups_are_read_together_as_far_as_they_fit() -> None:
    rows = [(b, s, min(s + GROUP_POSITIONS, 5000)) for b in (1, 0) for s in range(100, 5000, GROUP_POSITIONS)]
    found = list(pieces(checksums(*rows), 100, 5000, (10, 30), 3 * 10 * GROUP_POSITIONS, order=(1, 0)))
    assert [(piece.buffer, piece.start, piece.stop) for piece in found] == [
        *((1, start, min(start + GROUP_POSITIONS, 5000)) for start in range(100, 5000, GROUP_POSITIONS)),
        (0, 100, 3172),
        (0, 3172, 5000),
    ]
    assert sum(len(piece.checksums) for piece in found) == 10


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([(0, 0, 5), (0, 5, 10)], "buffer 1: digests up to 0"),
        ([(0, 0, 5), (0, 5, 10), (1, 0, 5)], "buffer 1: digests up to 5"),
        ([(0, 0, 5), (0, 5, 9), (1, 0, 5), (1, 5, 10)], "buffer 0: digests up to 9"),
        ([(0, 1, 10), (1, 0, 10)], "expected one from 0"),
        ([(0, 0, 6), (0, 5, 10), (1, 0, 5), (1, 5, 10)], "expected one from 6|digests up to 6"),
        ([(0, 0, 5), (0, 5, 10), (1, 0, 5), (1, 5, 10), (1, 10, 15)], "buffer 1"),
        ([(0, 0, 5), (0, 5, 10), (1, 0, 5), (1, 5, 10), (2, 0, 5), (2, 5, 10)], "buffer 2 of 2"),
        ([(0, 0, 11), (1, 0, 10)], "more than 100"),
    ],
)
def test_digests_that_do_not_cover_what_is_read_are_refused(
    rows: list[tuple[int, int, int]], what: str, ranks: int
) -> None:
    found = checksums(*rows)
    bounds = divide(found, 0, 10, ranks)

    def read_blocks() -> None:
        for block, (start, stop) in zip(checksums_of_blocks(found, bounds), pairwise(bounds), strict=True):
            if start < stop:
                list(pieces(block, start, stop, (10, 5), 100, order=(0, 1)))

    with pytest.raises(WrongGrant, match=what):
        read_blocks()


def test_digests_cover_every_position_of_every_buffer_once() -> None:
    pool, slots = Slots(LAYOUT, IDENTITY), np.arange(5, 1005)
    found = list(digests(pool.destination.buffers, slots, 7))
    assert [(c.buffer, c.start, c.stop) for c in found] == [(b, 7, 1007) for b in range(3)]
    pool.layers[1][1004] = UNTOUCHED - 3
    changed = list(digests(pool.destination.buffers, slots, 7))
    assert [a == b for a, b in zip(found, changed, strict=True)] == [True, False, True]


def test_blocks_begin_where_a_digest_begins_in_every_buffer() -> None:
    groups = [(0, s, min(s + 10, 95)) for s in range(5, 95, 10)] + [(1, s, min(s + 20, 95)) for s in range(5, 95, 20)]
    found = checksums(*groups)
    assert divide(found, 5, 95, 2) == (5, 45, 95)
    assert divide(found, 5, 95, 4) == (5, 25, 45, 65, 95)
    assert divide(found, 5, 95, 16)[::4] == (5, 25, 45, 65, 95)
    blocks = checksums_of_blocks(found, (5, 45, 45, 95))
    assert [sorted(zip(b.buffers, b.starts, strict=True)) for b in blocks] == [
        [(0, 5), (0, 15), (0, 25), (0, 35), (1, 5), (1, 25)],
        [],
        [(0, 45), (0, 55), (0, 65), (0, 75), (0, 85), (1, 45), (1, 65), (1, 85)],
    ]


def test_what_is_gathered_at_once_is_bounded_and_is_every_position_once() -> None:
    found = list(cut((3, 3, 80, 100), 30))
    assert found == [
        [range(3, 3), range(3, 33), range(80, 100)],
        [range(3, 3), range(33, 63), range(100, 100)],
        [range(3, 3), range(63, 80), range(100, 100)],
    ]
    assert np.array_equal(
        np.unique(expand_extents(tuple((r.start, len(r)) for step in found for r in step))), range(3, 100)
    )
