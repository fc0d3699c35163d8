"""Every method is given the same bytes, and figures are taken of those only that leave the right ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transfer import wire
from benchmarks.transfer.cases import Case, Fragmentation, Group
from benchmarks.transfer.initiator import Initiator, Plan
from benchmarks.transfer.methods import MethodFailed, Posting
from benchmarks.transfer.ours import source_pool
from benchmarks.transfer.placement import coalesced, in_one_piece, per_page, per_token, pieces, place
from benchmarks.transfer.pools import buffers_of, digests, fill
from transfer.copy_runs import stream_runs
from transfer.memory import BufferInfo
from transfer.planner import Descriptors, plan_runs

CASE = Case(tokens=50, layers=3, item_bytes=24, page_size=4, destination=Fragmentation.ITEMS)
SLOTS: list[int] = place(CASE).slots.tolist()


class Here:
    """A workbench whose target is in this process."""

    def __init__(self) -> None:
        self.kv = source_pool(CASE.layers, CASE.rows, CASE.item_bytes)
        fill(self.kv, seed=1)
        self.target = torch.ones_like(self.kv)
        self.link = self

    def pools(self, case: Case) -> "Here":
        return self

    def ask(self, saying: wire.Saying, answer: type[wire.Saying]) -> wire.Saying:
        if isinstance(saying, wire.Wipe):
            self.target.zero_()
            return wire.Done()
        assert isinstance(saying, wire.Digest)
        return wire.Digests(layers=digests(self.target, np.frombuffer(saying.slots, dtype="<i8")))


class Quiet:
    def case(self, case: Case) -> None: ...

    def round_done(self) -> None: ...


def compared(after: Callable[[torch.Tensor], Any] = lambda kv: None) -> None:
    """Compare the bytes of a method that copies everything and then does something to the target."""
    here, placement = Here(), place(CASE)

    def post(batch: Descriptors) -> None:
        stream_runs(batch)
        after(here.target)

    source, target = buffers_of(here.kv), buffers_of(here.target)
    posting = Posting("m", Group.OURS, placement, lambda: per_token(placement, source, target), post)
    initiator = Initiator(here, Plan([CASE], 1, 1.0, frozenset(Group)), Quiet())  # type: ignore[arg-type]
    initiator._compared(CASE, posting)


@pytest.mark.parametrize(
    ("spoil", "layers"),
    [
        (lambda kv: kv[1, SLOTS[17], 23].bitwise_xor_(1), "1"),
        (lambda kv: swap(kv, *SLOTS[:2]), "0, 1, 2"),
        (lambda kv: kv.zero_(), "0, 1, 2"),  # what an earlier method left does not pass
    ],
)
def test_wrong_bytes_are_found(spoil: Callable[[torch.Tensor], Any], layers: str) -> None:
    compared()
    with pytest.raises(MethodFailed, match=rf"left wrong bytes in layers \[{layers}\]"):
        compared(spoil)


def swap(kv: torch.Tensor, first: int, second: int) -> None:
    kv[:, [first, second]] = kv[:, [second, first]]


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
