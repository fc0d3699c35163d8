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


def test_the_right_bytes_pass() -> None:
    compared()


def test_a_flipped_bit_is_found() -> None:
    slot = int(place(CASE).slots[17])
    with pytest.raises(MethodFailed, match=r"left wrong bytes in layers \[1\]"):
        compared(lambda kv: kv[1, slot, 23].bitwise_xor_(1))


def test_two_items_in_each_others_place_are_found() -> None:
    first, second = place(CASE).slots[:2].tolist()
    with pytest.raises(MethodFailed, match=r"left wrong bytes in layers \[0, 1, 2\]"):
        compared(lambda kv: swap(kv, first, second))


def test_what_an_earlier_method_left_does_not_pass() -> None:
    with pytest.raises(MethodFailed, match="left wrong bytes"):
        compared(lambda kv: kv.zero_())


def swap(kv: torch.Tensor, first: int, second: int) -> None:
    kv[:, [first, second]] = kv[:, [second, first]]
