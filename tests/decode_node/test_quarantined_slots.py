"""When the slots of an attempt that was given up are safe again: what its writer says, and proofs of its death."""

import time

import pytest

from control.liveness import AnsweredPing
from control.messages import Abort, Admitted, AttemptId, Peer, PrefillFailed, PrefillRequest, Quiesced
from decode_node.prefill_nodes import SILENCE_S
from decode_node.request import Request
from tests.decode_node.remote_world import FIRST, SECOND, SLOTS, Landed, Lost, R, RemoteWorld
from tests.decode_node.world import GATEWAY
from transfer.fencing import DRAIN_GRACE_S, LANDED_CAN_WAIT_S


@pytest.mark.parametrize("is_done", [False, True])
def test_an_abort_is_repeated_until_nothing_is_in_flight_and_frees_then(h: RemoteWorld, is_done: bool) -> None:
    """sglang PRs 24580, 31357: pages freed on abort while the prefill node was still writing."""
    h.dispatch()
    h.remote.abandon(h.request)
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    assert h.remote.quarantine.num_slots == 3
    assert h.freed == []
    assert (h.done() if is_done else h.take(FIRST, Quiesced(attempt=R))) == []
    assert h.freed == [SLOTS]
    assert h.control.take(Admitted) == ([Admitted(attempt=R)] if is_done else [])
    assert not h.control.repeated


def test_a_pool_is_written_to_until_a_live_node_is_quiet(h: RemoteWorld) -> None:
    h.wait(0)
    h.dispatch()
    assert h.remote.quarantine.written_to
    h.remote.abandon(h.request)
    assert h.remote.quarantine.written_to
    h.clock.now += SILENCE_S + 1
    assert not h.remote.quarantine.written_to, "a dead node would keep this process from leaving"
    h.wait(0)
    h.take(FIRST, Quiesced(attempt=R))
    assert not h.remote.quarantine.written_to


@pytest.mark.parametrize("last", [Quiesced(attempt=R), PrefillFailed(attempt=R, reason="write failed")])
def test_a_failure_with_writes_in_flight_lifts_no_quarantine(h: RemoteWorld, last: Quiesced | PrefillFailed) -> None:
    """A failed call proves nothing about its other descriptors: they may land a second later."""
    h.dispatch()
    failed = PrefillFailed(attempt=R, reason="write failed", in_flight=True)
    [lost] = h.take(FIRST, failed)
    assert lost == Lost(h.request, "write failed")
    assert h.remote.nodes.choose(h.request) == SECOND, "the request does not wait for the old attempt's writes"
    assert h.take(FIRST, failed) == []
    assert h.freed == []
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    h.take(FIRST, last)
    assert h.freed == [SLOTS]
    assert not h.control.repeated


def test_a_failure_of_what_is_settled_here_is_answered_with_an_abort(h: RemoteWorld) -> None:
    """It is repeated until one comes, and the reservation may have been evicted meanwhile."""
    gone = AttemptId("decode", "gone", 4)
    h.take(FIRST, PrefillFailed(attempt=gone, reason="write failed", in_flight=True))
    assert h.control.take(Abort) == [Abort(attempt=gone)]


def test_a_silent_node_loses_its_requests_but_not_their_slots(h: RemoteWorld) -> None:
    h.dispatch()
    now = time.monotonic() + SILENCE_S + 1
    [lost] = h.tick(now)
    assert "silent" in lost.reason
    assert h.freed == []
    assert h.remote.quarantine.num_slots == 3
    assert h.remote.nodes.choose(h.request) == SECOND
    assert FIRST in h.control.watched, "it is listened to, to notice that it is back"


def test_a_silent_node_is_used_again_as_soon_as_it_answers(h: RemoteWorld) -> None:
    """sglang 13054: nothing is sticky. But each try would leave its slots in quarantine."""
    h.dispatch()
    h.clock.now += SILENCE_S + 1
    h.tick(h.clock.now)
    h.request.failed_nodes.clear()
    h.control.heard["first"] = h.clock.now + 1
    assert h.remote.nodes.choose(h.request) == SECOND, "what it said may be old"
    h.clock.now += 1000
    assert h.remote.nodes.choose(h.request) == SECOND, "time alone does not make it well"
    h.control.alive["first"] = h.clock.now
    assert h.remote.nodes.choose(h.request) == FIRST


def test_a_restart_of_the_writer_proves_it_dead(h: RemoteWorld) -> None:
    h.dispatch()
    h.answer("reborn", asked_at=h.clock.now + 1)
    h.clock.now += 2
    [lost] = h.tick(h.clock.now)
    assert "restarted" in lost.reason
    assert h.freed == []
    h.answer("reborn", asked_at=h.clock.now + 1)
    h.clock.now += 2
    h.tick(h.clock.now)
    assert h.freed == []
    h.clock.now += DRAIN_GRACE_S + 1
    h.tick(h.clock.now)
    assert h.freed == [SLOTS]
    assert not h.control.repeated, "nobody is left to be told to stop"


def test_a_late_word_of_the_process_before_the_writer_proves_nothing(h: RemoteWorld) -> None:
    """It had the same address. Whatever it said or answered was before the slots were named to its successor."""
    h.answer("the one before", asked_at=h.clock.now - 1)
    h.dispatch()
    assert h.wait(1) == []
    other = FIRST.model_copy(update={"boot_id": "the one before"})
    assert h.take(other, Quiesced(attempt=R)) == []
    assert h.table.is_writable(R)
    h.remote.abandon(h.request)
    assert h.take(other, Quiesced(attempt=R)) == []
    for _ in range(100):
        h.wait(1)
    assert h.freed == []
    assert h.remote.quarantine.num_slots == 3


def test_a_writer_that_is_heard_is_not_dead_whoever_has_its_address(h: RemoteWorld) -> None:
    """A mistake, as of two pods behind one name. It costs attempts, but frees no slots that may be written to."""
    h.dispatch()
    h.remote.abandon(h.request)
    for _ in range(100):
        h.answer("another", asked_at=h.clock.now + 0.5)
        h.wait(1)
    assert h.freed == []
    h.take(FIRST, Quiesced(attempt=R))
    assert h.freed == [SLOTS]


@pytest.mark.parametrize("said", ["quiesced", "failed", "done"])
def test_what_may_linger_is_waited_for_and_not_asked_about_again(h: RemoteWorld, said: str) -> None:
    h.dispatch()
    if said == "failed":
        failed = PrefillFailed(attempt=R, reason="a write failed", lingering=True)
        assert len(h.take(FIRST, failed)) == 1
    else:
        h.remote.abandon(h.request)
        message = Quiesced(attempt=R, lingering=True)
        assert (h.done(lingering=True) if said == "done" else h.take(FIRST, message)) == []
    assert h.freed == []
    assert not h.control.repeated
    h.tick(time.monotonic() + DRAIN_GRACE_S + 1)
    assert h.freed == [SLOTS]


def test_slots_of_a_prompt_that_landed_and_lingers_are_fenced(h: RemoteWorld) -> None:
    """What was cut and posted again arrived once more, after the request had ended."""
    h.dispatch()
    [landed] = h.done(lingering=True)
    assert isinstance(landed, Landed)
    assert h.request.host_slots == SLOTS
    assert h.retained == [SLOTS], "free when the request and the fence have both let go"
    assert h.control.take(Admitted) == [Admitted(attempt=R)]
    assert h.done(lingering=True) == []
    assert not h.remote.quarantine.written_to, "the node writes no more: nobody need wait for it"
    assert not h.remote.is_idle
    assert h.remote.quarantine.num_slots == 0, "the request uses them"
    h.wait(DRAIN_GRACE_S + LANDED_CAN_WAIT_S - 1)
    assert h.freed == []
    h.wait(1)
    assert h.freed == [SLOTS]
    assert h.remote.is_idle


def test_the_restart_of_another_node_proves_nothing(h: RemoteWorld) -> None:
    h.dispatch()
    h.control.answers[SECOND.address] = AnsweredPing("reborn", h.clock.now + 0.5)
    assert h.wait(1) == []
    assert h.table.is_writable(R)


RANKS = tuple(Peer(role="prefill", address=f"127.0.0.1:{port}", boot_id=f"first-{port}") for port in (12, 22))


def dispatch_to_a_group(h: RemoteWorld) -> None:
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {}, {"first": RANKS})
    h.dispatch()


def test_every_rank_of_a_node_is_a_writer_before_slots_are_named(h: RemoteWorld) -> None:
    dispatch_to_a_group(h)
    _, request = h.control.repeated["prefill", R]
    assert isinstance(request, PrefillRequest)
    assert request.ranks == ("first-12", "first-22")
    h.tick(h.clock.now)
    assert h.control.watched == {FIRST, SECOND, *RANKS}


def test_a_request_brings_the_ranks_of_an_unlisted_node(h: RemoteWorld) -> None:
    ranked = h.request.generate.model_copy(update={"prefill_ranks": {"first": RANKS}})
    assert h.remote.nodes.ranks_of(FIRST, Request(ranked, GATEWAY)) == RANKS
    assert h.remote.nodes.ranks_of(SECOND, Request(ranked, GATEWAY)) == ()


def test_a_restarted_node_proves_nothing_of_its_old_ranks(h: RemoteWorld) -> None:
    """An orphan would write into slots that were given away."""
    dispatch_to_a_group(h)
    h.control.heard |= {peer.boot_id: h.clock.now for peer in (FIRST, *RANKS)}
    h.remote.abandon(h.request)
    h.clock.now += 2 * SILENCE_S
    for died, peer in enumerate((FIRST, *RANKS)):
        h.tick(h.clock.now)
        h.clock.now += 2 * DRAIN_GRACE_S
        h.tick(h.clock.now)
        assert not h.freed, f"{died} of 3 are dead"
        assert h.remote.quarantine.num_slots == 3
        h.control.answers[peer.address] = AnsweredPing("another", h.clock.now)
        h.clock.now += 1
    h.tick(h.clock.now)
    h.tick(h.clock.now + DRAIN_GRACE_S)
    assert h.freed == [SLOTS]


def test_a_rank_does_not_speak_for_its_node(h: RemoteWorld) -> None:
    dispatch_to_a_group(h)
    assert h.take(RANKS[0], Quiesced(attempt=R)) == []
    h.remote.abandon(h.request)
    for rank in RANKS:
        h.take(rank, Quiesced(attempt=R))
    assert not h.freed
    assert ("abort", R) in h.control.repeated
    h.take(FIRST, Quiesced(attempt=R))
    assert h.freed == [SLOTS]
    assert ("abort", R) not in h.control.repeated
