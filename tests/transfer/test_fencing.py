"""A slot is never reused while a remote write to it may be in flight."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.messages import AttemptId, Peer
from transfer.fencing import DRAIN_GRACE_S, LANDED_CAN_WAIT_S, Fence, ReservationTable
from transfer.incoming import IncomingCut

WRITER = Peer(role="prefill", address="10.0.0.1:1", boot_id="first")
R = AttemptId("decode", "r", 1)


class Released(list[str]):
    """What the table gave back, and what it became an owner of beside a request."""

    def __init__(self) -> None:
        super().__init__()
        self.retained: list[str] = []


def table_with(
    make_fence: Callable[[], Fence] = lambda: IncomingCut(()), ranks: tuple[Peer, ...] = ()
) -> tuple[ReservationTable[AttemptId, Peer, str], Released]:
    """Attempt R may write to eight slots."""
    released = Released()
    table: ReservationTable[AttemptId, Peer, str] = ReservationTable(
        released.append, released.retained.append, make_fence
    )
    table.open(R, WRITER, "slots", num_slots=8, ranks=ranks)
    return table, released


def test_a_late_done_of_a_quarantined_epoch_does_not_land() -> None:
    table, _ = table_with()
    table.quarantine(R, now=1.0)
    with pytest.raises(ValueError, match="not writable"):
        table.landed(R, now=100.0)


def test_quarantine_counts_from_when_it_began() -> None:
    table, _ = table_with()
    assert table.quarantined == []
    table.quarantine(R, now=1.0)
    table.quarantine(R, now=5.0)
    assert [reservation.quarantined_at for reservation in table.quarantined] == [1.0]


def test_an_open_reservation_is_not_opened_again() -> None:
    table, _ = table_with()
    with pytest.raises(ValueError, match="open already"):
        table.open(R, WRITER, "other", 1)


@dataclass
class HeldFence:
    """Passed when the test says so."""

    is_passed: bool = False

    def passed(self) -> bool:
        return self.is_passed


class Fences(list[HeldFence]):
    """Those that a table has made."""

    def make(self) -> HeldFence:
        self.append(HeldFence())
        return self[-1]


def fenced_table() -> tuple[ReservationTable[AttemptId, Peer, str], Released, Fences]:
    fences = Fences()
    table, released = table_with(fences.make)
    table.quarantine(R, now=1.0)
    return table, released, fences


@pytest.mark.parametrize("lingers", [True, False])
def test_lingering_slots_come_back_after_the_grace_and_behind_a_fence(lingers: bool) -> None:
    """A write that had failed, or whose process had died, landed when a partition ended."""
    table, released, fences = fenced_table()
    if lingers:
        assert table.quiesced(R, "first", now=100.0, lingering=True)
    else:
        table.writer_gone("first", now=100.0)
    assert table.release_expired(100.0 + DRAIN_GRACE_S - 0.1) == []
    assert not fences
    for later in (0.0, 1.0, 1000.0):
        assert table.release_expired(100.0 + DRAIN_GRACE_S + later) == []
    [fence] = fences
    assert released == []
    fence.is_passed = True
    assert table.release_expired(1e6) == [R]
    assert released == ["slots"]
    assert len(table) == 0


def test_slots_whose_grace_ends_later_need_a_fence_that_is_made_later() -> None:
    table, released, fences = fenced_table()
    table.quiesced(R, "first", now=100.0, lingering=True)
    table.release_expired(110.0)
    table.open(R._replace(epoch=2), WRITER, "other", num_slots=8)
    table.quarantine(R._replace(epoch=2), now=111.0)
    table.quiesced(R._replace(epoch=2), "first", now=111.0, lingering=True)
    fences[0].is_passed = True
    assert table.release_expired(120.0) == [R]
    assert table.release_expired(120.0) == []
    assert len(fences) == 2
    fences[1].is_passed = True
    assert table.release_expired(121.0) == [R._replace(epoch=2)]
    assert released == ["slots", "other"]


def test_slots_that_prove_quiet_before_a_fence_are_freed_once() -> None:
    table, released, fences = fenced_table()
    table.writer_gone("first", now=100.0)
    table.release_expired(110.0)
    assert table.quiesced(R, "first", now=100.0)
    table.open(R, WRITER, "other", num_slots=8)
    table.quarantine(R, now=111.0)
    fences[0].is_passed = True
    assert table.release_expired(120.0) == []
    assert released == ["slots"]


def test_slots_that_landed_and_linger_have_two_owners_until_a_fence() -> None:
    """The first copy of what was cut and posted again arrived when the slots had been given away."""
    fences = Fences()
    table, released = table_with(fences.make)
    assert table.landed(R, now=100.0, lingering=True) == "slots"
    assert released.retained == ["slots"]
    assert not table.quarantined, "a request uses them"
    assert not table.quiesced(R, "first", now=100.0)
    assert not table.quiesced(R, "first", now=101.0, lingering=True)
    with pytest.raises(ValueError, match="not writable"):
        table.landed(R, now=100.0)
    alone = 100.0 + DRAIN_GRACE_S + LANDED_CAN_WAIT_S
    assert table.release_expired(alone - 0.1) == []
    assert not fences, "a fence cuts others, whose writes linger then"
    assert table.release_expired(alone) == []
    assert released == []
    fences[0].is_passed = True
    assert table.release_expired(alone) == [R]
    assert released == ["slots"]


def test_slots_that_landed_and_linger_are_free_behind_a_fence_of_others() -> None:
    table, released, fences = fenced_table()
    for number, landed_at in ((2, 100.0), (3, 103.0)):
        table.open(R._replace(epoch=number), WRITER, f"landed at {landed_at:g}", num_slots=8)
        table.landed(R._replace(epoch=number), now=landed_at, lingering=True)
    table.quiesced(R, "first", now=101.0, lingering=True)
    assert table.release_expired(101.0 + DRAIN_GRACE_S) == []
    [fence] = fences
    fence.is_passed = True
    assert table.release_expired(108.0) == [R, R._replace(epoch=2)]
    assert released == ["slots", "landed at 100"]
    assert table.release_expired(103.0 + DRAIN_GRACE_S + LANDED_CAN_WAIT_S - 0.1) == [], "it has a grace of its own"
    assert len(fences) == 1


@given(
    st.lists(
        st.sampled_from(
            ["quarantine", "quiesced", "lingers", "landed", "landed lingering", "gone", "expire", "expire late"]
        ),
        max_size=12,
    )
)
def test_in_any_order_of_events_slots_leave_once_and_never_while_writable(events: list[str]) -> None:
    table, released = table_with()
    landed = 0
    for now, event in enumerate(events, start=1):
        was_writable = table.is_writable(R)
        before = len(released)
        match event:
            case "quarantine" if R in table:
                table.quarantine(R, now=1.0)
            case "quiesced":
                table.quiesced(R, "first", now=100.0)
            case "lingers":
                table.quiesced(R, "first", now, lingering=True)
            case "landed" if was_writable:
                table.landed(R, now=100.0)
                landed += 1
            case "landed lingering" if was_writable:
                table.landed(R, now, lingering=True)
                landed += 1
            case "gone":
                table.writer_gone("first", now)
            case "expire":
                table.release_expired(now + 2 * DRAIN_GRACE_S)
            case "expire late":
                table.release_expired(now + DRAIN_GRACE_S + LANDED_CAN_WAIT_S)
        if was_writable:
            assert len(released) == before
    assert len(released) + landed + (R in table) == 1 + len(released.retained), "as many owners as there should be"
