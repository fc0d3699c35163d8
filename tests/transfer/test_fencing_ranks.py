"""Slots that several processes of one prefill node may write to are free when every one of them is done."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.messages import AttemptId, Peer
from tests.transfer.test_fencing import WRITER, R, Released, table_with
from transfer.fencing import DRAIN_GRACE_S, ReservationTable

RANKS = tuple(Peer(role="prefill", address=f"10.0.0.1:{number}", boot_id=f"rank-{number}") for number in (3, 5))
BOOTS = [WRITER.boot_id, *(rank.boot_id for rank in RANKS)]


def quarantined_table() -> tuple[ReservationTable[AttemptId, Peer, str], Released]:
    table, released = table_with(ranks=RANKS)
    assert table.quarantine(R, now=1.0) == WRITER, "the node is told to stop"
    return table, released


@pytest.mark.parametrize("order", list(permutations(BOOTS)), ids="-".join)
def test_whichever_dies_last_is_waited_for(order: tuple[str, ...]) -> None:
    table, released = quarantined_table()
    for now, boot in enumerate(order, start=1):
        assert table.release_expired(1e6) == []
        table.writer_gone(boot, 100.0 * now)
    assert table.release_expired(300.0 + DRAIN_GRACE_S - 0.1) == []
    assert table.release_expired(300.0 + DRAIN_GRACE_S) == [R]
    assert released == ["slots"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["quiesced", "lingers", "gone", "expire"]), st.sampled_from(BOOTS)),
        max_size=10,
    )
)
def test_in_any_order_slots_leave_once_and_not_before_every_writer_is_done(events: list[tuple[str, str]]) -> None:
    table, released = quarantined_table()
    done: set[str] = set()
    for now, (event, boot) in enumerate(events, start=2):
        match event:
            case "quiesced" | "lingers":
                table.quiesced(R, boot, now, lingering=event == "lingers")
                done |= set(BOOTS) if boot == WRITER.boot_id else {boot}
            case "gone":
                table.writer_gone(boot, now)
                done.add(boot)
            case "expire":
                table.release_expired(now + DRAIN_GRACE_S)
        assert not released or done == set(BOOTS)
        assert len(released) + (R in table) == 1
