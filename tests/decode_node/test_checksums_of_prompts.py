"""Nothing lands before it is verified, prompt by prompt."""

import pytest

from control.messages import Abort, Admitted, Holding, NotHeld, PrefillAccepted, PrefillFailed, Quiesced
from decode_node.prefill_nodes import SILENCE_S
from decode_node.request import RequestState
from tests.decode_node.remote_world import CHECKSUMS, FIRST, SECOND, SLOTS, Clock, Landed, Lost, R, RemoteWorld
from transfer.checksum import Mismatch
from transfer.fencing import DRAIN_GRACE_S
from transfer.memory import Checksum


@pytest.fixture
def h(monkeypatch: pytest.MonkeyPatch) -> RemoteWorld:
    return RemoteWorld(Clock(monkeypatch))


def test_what_has_landed_is_not_lost_to_a_node_that_leaves_before_its_checksums_are_verified(h: RemoteWorld) -> None:
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    assert h.take(FIRST, PrefillFailed(attempt=R, reason="stopping", leaving=True)) == []
    assert h.verified() == [Landed(h.request)]


def test_nothing_lands_before_its_checksums_are_verified(h: RemoteWorld) -> None:
    h.dispatch()
    assert h.done(checksums=CHECKSUMS) == []
    [waiting] = h.verifier.waiting
    assert (waiting.attempt.id, waiting.chunk, waiting.checksums) == (R, None, CHECKSUMS)
    assert (waiting.attempt.slots, waiting.attempt.num_tokens) == (SLOTS, 3)
    assert h.request.state is RequestState.PREFILLING
    assert h.table.is_writable(R)
    assert h.control.take(Admitted) == [], "the source pages are kept"
    assert h.verified() == [Landed(h.request)]
    assert h.request.host_slots == SLOTS
    assert h.control.take(Admitted) == [Admitted(attempt=R)]
    assert h.remote.is_idle


def test_what_has_landed_is_not_lost_to_a_node_that_fails_before_its_checksums_are_verified(h: RemoteWorld) -> None:
    """It gave up on a decode node that was silent for a while, say. Nothing depends on it any more."""
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    for in_flight in (True, False):
        failed = PrefillFailed(attempt=R, reason="the decode node is silent", in_flight=in_flight)
        assert h.take(FIRST, failed) == []
    assert h.verified() == [Landed(h.request)]
    assert h.freed == []


def test_only_the_node_that_was_asked_ends_an_attempt(h: RemoteWorld) -> None:
    h.dispatch(FIRST)
    for message in (
        PrefillAccepted(attempt=R),
        PrefillFailed(attempt=R, reason="no"),
        PrefillFailed(attempt=R, reason="no", leaving=True),
        Quiesced(attempt=R),
        NotHeld(attempts=(R,)),
    ):
        assert h.take(SECOND, message) == []
    assert h.request.state is RequestState.PREFILLING
    assert ("prefill", R) in h.control.repeated
    assert len(h.done()) == 1


def test_done_that_is_repeated_while_it_is_verified_is_verified_once(h: RemoteWorld) -> None:
    h.dispatch()
    for _ in range(3):
        assert h.done(checksums=CHECKSUMS) == []
    assert len(h.verifier.waiting) == 1
    assert len(h.verified()) == 1


def test_a_mismatch_is_never_served_and_the_retry_goes_to_the_other_node_with_a_new_epoch(h: RemoteWorld) -> None:
    """vllm 44238, sglang 23020: corruption under concurrent transfers."""
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    [lost] = h.verified(Mismatch(Checksum(1, 0, 3, 12), 13, ((0x1000, 48),)))
    assert lost == Lost(h.request, "1 of 2 checksums do not match")
    assert h.request.state is RequestState.WAITING
    assert h.request.host_slots is None
    assert h.control.take(Admitted) == []
    assert h.failures("checksum") == 1
    assert h.remote.quarantine.num_slots == 3
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    assert h.remote.nodes.choose(h.request) == SECOND
    h.dispatch(SECOND)
    assert h.request.epoch == 2
    h.take(FIRST, Quiesced(attempt=R))
    assert h.freed == [SLOTS]


def test_what_cannot_be_verified_is_not_served_either(h: RemoteWorld) -> None:
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    [lost] = h.verified(error="out of memory")
    assert lost == Lost(h.request, "checksums could not be verified: out of memory")
    assert h.failures("verification") == 1
    assert h.failures("checksum") == 0


def test_the_result_for_a_request_that_was_given_up_meanwhile_is_dropped(h: RemoteWorld) -> None:
    """sglang PRs 24580, 31357: the slots are the next one's by now."""
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    h.remote.abandon(h.request)
    h.take(FIRST, Quiesced(attempt=R))
    assert h.freed == [SLOTS]
    assert h.verified() == []
    assert h.request.host_slots is None
    assert h.failures("checksum") == 0
    assert h.remote.is_idle


def test_when_the_verifier_is_busy_the_repeated_message_is_offered_again(h: RemoteWorld) -> None:
    h.verifier.room = 0
    h.dispatch()
    assert h.done(checksums=CHECKSUMS) == []
    h.verifier.room = 1
    assert h.done(checksums=CHECKSUMS) == []
    assert len(h.verified()) == 1


def test_a_node_that_dies_after_its_last_write_costs_nothing(h: RemoteWorld) -> None:
    """Everything landed before it said so; only the checksums are left to be looked at."""
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    h.clock.now += SILENCE_S + 1
    assert h.tick(h.clock.now) == []
    assert h.control.take(Holding) == []
    h.answer("reborn", asked_at=h.clock.now)
    h.clock.now += 1
    assert h.tick(h.clock.now) == []
    assert len(h.verified()) == 1
    assert h.remote.is_idle
    h.clock.now += DRAIN_GRACE_S + 10
    h.tick(h.clock.now)
    assert h.freed == [], "the slots went on with the request"


def test_a_mismatch_after_the_writers_death_is_free_after_the_grace(h: RemoteWorld) -> None:
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    h.clock.now += 1
    assert len(h.verified(Mismatch(Checksum(0, 0, 3, 1), 2))) == 1
    h.answer("reborn", asked_at=h.clock.now + 0.5)
    h.clock.now += 1
    h.tick(h.clock.now)
    assert h.freed == []
    h.clock.now += DRAIN_GRACE_S + 1
    h.tick(h.clock.now)
    assert h.freed == [SLOTS]


def test_done_by_a_node_that_was_not_asked_lands_nothing(h: RemoteWorld) -> None:
    h.dispatch(FIRST)
    assert h.done(node=SECOND) == []
    assert h.request.state is RequestState.PREFILLING
    assert len(h.done()) == 1
