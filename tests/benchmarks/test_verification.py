"""Figures are taken of methods only that leave the right bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.transfer import wire
from benchmarks.transfer.cases import Case, Fragmentation
from benchmarks.transfer.groups import Group
from benchmarks.transfer.initiator import Initiator, Plan
from benchmarks.transfer.methods import MethodFailed, Posting
from benchmarks.transfer.ours import source_pool
from benchmarks.transfer.placement import per_token, place
from benchmarks.transfer.pools import buffers_of, digests, fill
from transfer.copy_runs import stream_runs
from transfer.planner import Descriptors

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
