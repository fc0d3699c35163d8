"""What ranks of a prefill node tell each other arrives as it was sent, and nothing but that is read."""

import pickle
from dataclasses import fields, is_dataclass

import msgpack
import numpy as np
import pytest

from control.messages import AttemptId
from prefill_node.ranks.order_codec import OF_FIRST, OF_OTHERS
from prefill_node.ranks.orders import (
    Begin,
    Connected,
    DividedPrefix,
    End,
    Forget,
    Gather,
    Order,
    PartRead,
    PartReport,
    PartSent,
    PlannedChunk,
    Read,
    Step,
    Stop,
    StopReading,
)
from tests.prefill_node.endpoint_harness import DECODE, R, request
from transfer.memory import Checksum, Checksums

PAGES, SLOTS = np.array([3, 1, 2**40]), np.arange(5)
SUM = Checksum(0, 3, 9, 2**64 - 1)
ORDERS: list[Order] = [
    Begin(DECODE, request()),
    Step((PlannedChunk(R, 0, 6, 11, PAGES), PlannedChunk(AttemptId("other", "r", 2), 6, 10, 11, PAGES[:0]))),
    Read(R, 0, 5, PAGES, SLOTS, Checksums.of([SUM]), 7),
    StopReading(R),
    Gather((DividedPrefix(PAGES, (0, 3, 5)),)),
    Stop(R),
    Forget(R),
    Connected(frozenset({"a", "b"})),
    Connected(frozenset()),
    End(),
]
REPORTS: list[PartReport] = [
    PartSent(R, 3, 5, 1, None, 2.5, 0.0, [SUM], None, False, True),
    PartSent(R, 3, 5, 1, 1.5, 2.5, 0.0, [], "the connection was lost", True, False),
    PartRead(R, 5, 0.5, "it took too long", "timeout", False),
    PartRead(R, 5, 0.5, None, None, True),
]


def same(first: object, second: object) -> bool:
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and first.dtype == second.dtype and np.array_equal(first, second)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if is_dataclass(first):
        names = [each.name for each in fields(first)]
        return type(first) is type(second) and all(same(getattr(first, n), getattr(second, n)) for n in names)
    return type(first) is type(second) and first == second


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_orders_arrive_as_they_were_sent(order: Order) -> None:
    assert same(OF_OTHERS.decode(OF_FIRST.encode(order)), order)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_reports_arrive_as_they_were_sent(report: PartReport) -> None:
    assert same(OF_FIRST.decode(OF_OTHERS.encode(report)), report)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pickle.dumps(End()),
        msgpack.packb(("End",)),
        msgpack.packb(("Exit", {})),
        msgpack.packb((["End"], {})),
        msgpack.packb(("Forget", {})),
        msgpack.packb(("Forget", {"attempt": 3})),
        msgpack.packb(("Read", {"attempt": R, "start": 0, "stop": 1, "pages": [1], "slots": b"", "after": 0})),
        msgpack.packb(("Gather", {"prefixes": [{"pages": b"1234567", "bounds": [0]}]})),
        b"\x91" * 5000 + b"\x00",
        OF_OTHERS.encode(REPORTS[0]),
    ],
)
def test_what_is_no_order_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        OF_OTHERS.decode(data)
