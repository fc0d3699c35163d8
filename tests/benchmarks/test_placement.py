"""Cases are as scattered as they say, and every method is given the same bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transfer.cases import Case, Fragmentation
from benchmarks.transfer.placement import coalesced, in_one_piece, per_page, per_token, pieces, place
from transfer.memory import BufferInfo
from transfer.planner import Descriptors, plan_runs

CASES = st.builds(
    Case,
    tokens=st.integers(1, 100),
    layers=st.integers(1, 3),
    item_bytes=st.integers(1, 5),
    page_size=st.integers(1, 16),
    source=st.sampled_from(Fragmentation),
    destination=st.sampled_from(Fragmentation),
    concurrency=st.integers(1, 3),
)


def buffers(case: Case, base: int) -> BufferInfo:
    length = case.rows * case.item_bytes
    return BufferInfo(
        ptrs=tuple(base + layer * length for layer in range(case.layers)),
        lengths=(length,) * case.layers,
        item_lengths=(case.item_bytes,) * case.layers,
    )


def pairs(batch: Descriptors) -> set[tuple[int, int]]:
    """(source byte, destination byte) of everything that is written."""
    columns = zip(*(column.tolist() for column in batch), strict=True)
    found = [(source + i, to + i) for source, to, length in columns for i in range(length)]
    assert len(found) == len(set(found)), "no byte is written twice"
    return set(found)


@given(CASES)
def test_every_kind_of_descriptor_writes_the_same_bytes(case: Case) -> None:
    placement, source, target = place(case), buffers(case, 10**6), buffers(case, 10**9)
    tokens = per_token(placement, source, target)
    assert int(tokens.lengths.sum()) == case.num_bytes
    assert pairs(tokens) == pairs(per_page(placement, case.page_size, source, target))
    assert pairs(tokens) == pairs(coalesced(placement, source, target))
    whole = in_one_piece(case)
    assert pairs(per_token(whole, source, target)) == pairs(pieces(case.concurrency * case.tokens, source, target))


@pytest.mark.parametrize(
    ("source", "destination", "runs"),
    [
        (Fragmentation.CONTIGUOUS, Fragmentation.CONTIGUOUS, 1),
        (Fragmentation.PAGES, Fragmentation.CONTIGUOUS, 16),
        (Fragmentation.CONTIGUOUS, Fragmentation.PAGES, 16),
        (Fragmentation.PAGES, Fragmentation.PAGES, 16),
        (Fragmentation.ITEMS, Fragmentation.CONTIGUOUS, 1024),
        (Fragmentation.PAGES, Fragmentation.ITEMS, 1024),
    ],
)
def test_scattered_pieces_are_no_neighbours(source: Fragmentation, destination: Fragmentation, runs: int) -> None:
    placement = place(Case(tokens=1024, page_size=64, source=source, destination=destination))
    assert len(plan_runs(placement.items, placement.slots)) == runs
