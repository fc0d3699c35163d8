"""Nothing lands before it is verified: chunks of a prompt, each with its checksums, come in any order or not at all."""

import itertools
from collections.abc import Callable

import pytest

from control.messages import Abort, Admitted, Holding, NotHeld, PrefillAccepted, PrefillFailed, Quiesced
from decode_node.attempt import AttemptState
from decode_node.prefill_nodes import SILENCE_S
from decode_node.request import RequestState
from tests.decode_node.remote_world import (
    CHECKSUMS,
    CHUNK_CHECKSUMS,
    FIRST,
    NO_CHECKSUMS,
    PATIENCE_S,
    SECOND,
    SLOTS,
    Landed,
    Lost,
    R,
    RemoteWorld,
)
from transfer.checksum import Mismatch
from transfer.fencing import DRAIN_GRACE_S
from transfer.memory import Checksum


def test_a_chunk_is_verified_before_the_last_has_landed(h: RemoteWorld) -> None:
    h.dispatch()
    assert h.chunk(0) == []
    [waiting] = h.verifier.waiting
    assert (waiting.attempt.id, waiting.chunk, waiting.checksums) == (R, 0, CHUNK_CHECKSUMS)
    assert (waiting.attempt.slots, waiting.attempt.num_tokens) == (SLOTS, 3)
    assert h.table.is_writable(R)
    assert h.taken() == [0], "it is said when it was taken, so that nothing waits for it"
    assert h.verified() == []
    assert h.request.state is RequestState.PREFILLING
    assert h.control.take(Admitted) == []
    assert h.done(chunks=1, checksums=CHECKSUMS) == []
    assert h.verified() == [Landed(h.request)]
    assert h.control.take(Admitted) == [Admitted(attempt=R)]
    assert h.remote.is_idle


@pytest.mark.parametrize("order", [*itertools.permutations(("first", "second", "done"))])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_prompt_lands_when_all_is_said_and_verified_in_any_order(
    h: RemoteWorld, order: tuple[str, ...], at_once: bool
) -> None:
    """Verified as it comes, or all of it behind the last message; and everything is said twice."""
    say = {
        "first": lambda: h.chunk(0),
        "second": lambda: h.chunk(1),
        "done": lambda: h.done(chunks=2, checksums=CHECKSUMS),
    }
    h.dispatch()
    outcomes: list[Landed | Lost] = []
    for what in order:
        assert outcomes == []
        for _ in range(2):
            outcomes += say[what]()
        assert len(h.verifier.waiting) == (1 if at_once else len(order[: order.index(what) + 1]))
        if at_once:
            outcomes += h.verified()
    while h.verifier.waiting:
        assert outcomes == []
        outcomes += h.verified()
    assert outcomes == [Landed(h.request)]
    assert sorted(h.taken()) == [0, 0, 1, 1]
    assert h.request.host_slots == SLOTS
    for what in order:
        assert say[what]() == [], "its answer was lost"
    assert sorted(h.taken()) == [0, 1]
    assert h.control.take(Admitted) == [Admitted(attempt=R)] * 2
    assert h.verifier.waiting == []


def test_a_mismatch_in_an_early_chunk_fails_the_attempt_at_once(h: RemoteWorld) -> None:
    h.dispatch()
    h.chunk(0)
    h.chunk(1)
    [lost] = h.verified(Mismatch(Checksum(0, 0, 1, 13), 14, ((0x1000, 16),)))
    assert lost == Lost(h.request, "1 of 1 checksums do not match")
    assert h.failures("checksum") == 1
    assert h.remote.quarantine.num_slots == 3
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    assert h.remote.nodes.choose(h.request) == SECOND
    h.taken()

    h.dispatch(SECOND)
    assert h.verified() == [], "the result of the other chunk, that nobody waits for any more"
    assert h.chunk(1) == []
    assert h.chunk(2) == []
    assert h.taken() == [1, 2], "what is said of it until the abort arrives need not be repeated"
    assert h.verifier.waiting == []
    assert h.done(chunks=3, checksums=CHECKSUMS) == []
    assert h.freed == [SLOTS], "that all has landed is as good as Quiesced"
    assert (h.request.state, h.failures("checksum")) == (RequestState.PREFILLING, 1)


def test_a_chunk_of_an_old_epoch_says_nothing_of_the_new_one(h: RemoteWorld) -> None:
    h.dispatch()
    h.take(FIRST, PrefillFailed(attempt=R, reason="write failed"))
    h.dispatch()
    assert h.chunk(0, epoch=1) == h.done(epoch=1) == []
    assert h.table.is_writable(R._replace(epoch=2))
    assert h.taken() == [0]
    assert h.verifier.waiting == []
    h.done(epoch=2, chunks=1, checksums=CHECKSUMS)
    assert h.verified() == [], "its own chunk is still to come"
    h.chunk(0, epoch=2)
    assert h.verified() == [Landed(h.request)]


def test_a_chunk_is_not_answered_while_the_verifier_is_busy(h: RemoteWorld) -> None:
    h.verifier.room = 1
    h.dispatch()
    h.chunk(0)
    h.chunk(1)
    assert h.taken() == [0]
    h.done(chunks=2, checksums=CHECKSUMS)
    assert h.verified() == []
    h.chunk(1)
    assert h.taken() == [1]
    assert h.verified() == []
    h.done(chunks=2, checksums=CHECKSUMS)
    assert h.verified() == [Landed(h.request)]


@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_lost_chunk_is_waited_for_and_not_for_ever(h: RemoteWorld, is_repeated: bool) -> None:
    """Not even if the node says that everything landed, and repeats that it holds the request."""
    h.dispatch()
    h.accepted()
    h.progress(computed=3)
    h.done(chunks=1, checksums=CHECKSUMS)
    assert h.verified() == []
    for _ in range(int(PATIENCE_S) - 1):
        assert h.wait(1) == []
        assert h.control.take(Holding)[-1] == Holding(attempts=(R,)), "the node is still asked"
        h.progress(computed=3)
    if is_repeated:
        h.chunk(0)
        assert h.verified() == [Landed(h.request)]
    else:
        assert h.wait(2) == [Lost(h.request, "prefill node 127.0.0.1:2 has made no progress for 60 s")]
        assert h.remote.quarantine.num_slots == 3


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (lambda h: h.chunk(2), "chunk 2 landed, of 2 that there can be"),
        (lambda h: h.chunk(1) + h.done(chunks=1), "chunk 1 landed, of 1 that there can be"),
        (lambda h: h.done(chunks=1) + h.chunk(1), "chunk 1 landed, of 1 that there can be"),
        (lambda h: h.done(num_tokens=2), "prefill covered 2 tokens, not 3"),
        (lambda h: h.done(chunks=3), "3 chunks before the last one, in 3 tokens"),
        (lambda h: h.chunk(0) + h.verified(error="no memory"), "checksums could not be verified: no memory"),
    ],
)
def test_a_node_that_contradicts_itself_is_not_served(
    h: RemoteWorld, mistake: Callable[[RemoteWorld], list[Landed | Lost]], reason: str
) -> None:
    h.dispatch()
    assert mistake(h) == [Lost(h.request, reason)]
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    assert h.failures("verification") == ("verified" in reason)


def test_a_chunk_without_checksums_is_not_verified(h: RemoteWorld) -> None:
    h.dispatch()
    assert h.done(chunks=1) == []
    assert h.chunk(0, checksums=NO_CHECKSUMS) == [Landed(h.request)]


def test_an_attempt_ends_once_and_nothing_is_verified_that_was_never_taken(h: RemoteWorld) -> None:
    h.dispatch()
    h.chunk(0)
    [waiting] = h.verifier.waiting
    for chunk in (None, 1):
        with pytest.raises(RuntimeError, match="was verified and never taken"):
            waiting.attempt.verified(chunk)
    h.verified()
    h.done(chunks=1)
    assert waiting.attempt.num_checksums == len(CHUNK_CHECKSUMS)
    for state in AttemptState:
        with pytest.raises(RuntimeError, match=f"is landed and cannot become {state.value}"):
            waiting.attempt.move(state, 0.0)


@pytest.mark.parametrize("end", ["silent", "restarted", "not held", "failed", "leaving"])
def test_a_prompt_whose_chunk_was_lost_with_its_node_is_lost(h: RemoteWorld, end: str) -> None:
    h.dispatch()
    h.accepted()
    h.chunk(0)
    h.done(chunks=2, checksums=CHECKSUMS)
    match end:
        case "silent":
            h.clock.now += SILENCE_S + 1
            outcomes = h.tick(h.clock.now)
        case "restarted":
            h.answer("reborn", asked_at=h.clock.now + 0.5)
            outcomes = h.wait(1)
        case "not held":
            outcomes = h.take(FIRST, NotHeld(attempts=(R,)))
        case _:
            failed = PrefillFailed(attempt=R, reason="stopping", leaving=end == "leaving")
            outcomes = h.take(FIRST, failed)
    assert [type(outcome) for outcome in outcomes] == [Lost]
    assert h.request.state is RequestState.WAITING
    assert h.verified() == []
    assert h.remote.nodes.choose(h.request) == SECOND
    assert h.freed == ([] if end in ("silent", "restarted") else [SLOTS])


def test_what_has_landed_survives_a_failure_of_its_node(h: RemoteWorld) -> None:
    """It gave up on a decode node that was silent for a while, say. Nothing depends on it any more."""
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    for fields in ({"in_flight": True}, {}, {"leaving": True}):
        failed = PrefillFailed(attempt=R, reason="the decode node is silent", **fields)
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
    assert h.chunk(0, node=SECOND) == h.done(node=SECOND) == []
    assert (h.verifier.waiting, h.taken()) == ([], [])
    assert h.request.state is RequestState.PREFILLING
    assert ("prefill", R) in h.control.repeated
    assert len(h.done()) == 1


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


def test_a_node_that_dies_after_its_last_write_costs_nothing(h: RemoteWorld) -> None:
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
