"""What is told of writes that failed, may arrive later, or may never have ended."""

import pytest

from control.messages import Abort, Admitted, Holding, NotHeld, PrefillDone, PrefillFailed, Quiesced
from tests.prefill_node.world import R, World, request


@pytest.mark.parametrize("lingering", [False, True])
def test_a_failed_write_ends_the_request_after_the_rest_has_drained(lingering: bool) -> None:
    h = World.sending()
    h.sent(error="the peer is gone", lingering=lingering)
    early = h.only(PrefillFailed)
    assert early.in_flight, "the decode node need not wait to look elsewhere, but the slots are not quiet"
    assert h.control.take(PrefillFailed) == []
    assert h.free_pages == 5
    h.sent()
    assert not h.control.repeated
    [failed] = h.control.take(PrefillFailed)
    assert "the peer is gone" in failed.reason
    assert (failed.in_flight, failed.lingering) == (False, lingering)
    assert h.free_pages == 8


def test_that_a_failed_write_may_linger_is_said_with_every_answer() -> None:
    h = World.sending()
    h.sent(error="the transport gave a write up", lingering=True)
    early = h.only(PrefillFailed)
    assert (early.in_flight, early.lingering) == (True, True)
    h.receive(Abort(attempt=R))
    h.sent()
    quiesced = Quiesced(attempt=R, lingering=True)
    assert h.control.take(Quiesced) == [quiesced]
    for late in (Abort(attempt=R), request(), Holding(attempts=(R,))):
        h.receive(late)
        assert h.control.take(Quiesced) == [quiesced], "the first may have been lost"
    assert all(not held.attempts for held in h.control.take(NotHeld))
    assert h.free_pages == 8, "the network needs no pages"


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_attempt_with_a_write_of_unknown_end_is_never_called_quiet(world_size: int) -> None:
    """Not even behind a fence: Mooncake may have it queued, and send it over a connection that does not exist yet."""
    h = World.sending(world_size)
    free = h.free_pages
    h.sent(rank=world_size - 1, error="nobody knows whether a write has ended", in_flight=True)
    for rank, worker in enumerate(h.workers):
        while worker.writes:
            h.sent(rank)
    failed = h.only(PrefillFailed)
    assert failed.in_flight, "the decode node goes elsewhere, and keeps its slots in quarantine"
    h.receive(Abort(attempt=R))
    h.receive(Holding(attempts=(R,)))
    assert not h.control.take(Quiesced)
    assert not h.control.take(NotHeld)
    assert h.free_pages == free
    assert list(h.held) == [R]


def test_that_a_prompt_that_landed_lingers_is_said_with_every_answer() -> None:
    """A chunk was cut and posted again: the decode node must not give the slots away before it has fenced them."""
    h = World.sending()
    h.sent(lingering=True)
    h.sent()
    done = h.only(PrefillDone)
    assert done.lingering
    h.receive(Admitted(attempt=R))
    h.receive(Abort(attempt=R))
    assert h.control.take(Quiesced) == [Quiesced(attempt=R, lingering=True)]
