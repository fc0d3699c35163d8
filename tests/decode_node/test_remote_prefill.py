"""Which prefill node, how often, what lands, and when slots are safe again."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from base.metrics import Metrics
from control.liveness import AnsweredPing
from control.messages import (
    Abort,
    Admitted,
    AttemptId,
    Checksum,
    Checksums,
    ChunkDone,
    ChunkTaken,
    Generate,
    Holding,
    NotHeld,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Progress,
    Quiesced,
)
from control.prompt_logprobs import PromptLogprobs
from decode_node.health import SILENCE_S
from decode_node.remote_prefill import PrefillMessage, RemotePrefill
from decode_node.request import Request, RequestState
from decode_node.verifier import Verified
from hisparse.extents import Extent, HostSlots
from tests.decode_node.fakes import GATEWAY, HeldVerifier, Lost, destination
from tests.prefill_node.fakes import FakeControl
from transfer.checksum import Mismatch
from transfer.fencing import DRAIN_GRACE_S, LANDED_CAN_WAIT_S, ReservationTable
from transfer.incoming import IncomingCut

FIRST = Peer(role="prefill", address="127.0.0.1:2", boot_id="first")
SECOND = Peer(role="prefill", address="127.0.0.1:3", boot_id="second")
SLOTS = HostSlots((Extent(4, 3),))
R = AttemptId("decode", "r", 1)
PATIENCE_S = 60.0
CHECKSUMS = Checksums.of(
    [Checksum(buffer=0, start=0, stop=3, digest=11), Checksum(buffer=1, start=0, stop=3, digest=12)]
)
CHUNK_CHECKSUMS = Checksums.of([Checksum(buffer=0, start=0, stop=1, digest=13)])
NO_CHECKSUMS = Checksums()


class Clock:
    """The time of the decode node's loop, which passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr("decode_node.remote_prefill.time.monotonic", lambda: self.now)


@dataclass(frozen=True)
class Landed:
    """A call made this request land."""

    request: Request


class Harness:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.control = FakeControl()
        self.freed: list[HostSlots] = []
        self.lost: list[Lost] = []
        self.retained: list[HostSlots] = []
        self.table: ReservationTable[HostSlots] = ReservationTable(
            self.freed.append, self.retained.append, lambda: IncomingCut(())
        )
        self.verifier = HeldVerifier()
        self.metrics = Metrics()
        self.destination = destination(num_slots=100)
        self.remote = RemotePrefill(
            self.control,  # type: ignore[arg-type]
            self.destination,
            self.table,
            self.verifier.submit,
            self.metrics,
            patience=PATIENCE_S,
            on_lost=lambda request, reason: self.lost.append(Lost(request, reason)),
        )
        generate = Generate(request_id="r", prompt_ids=(1, 2, 3, 4), max_new_tokens=4, prefill_nodes=(FIRST, SECOND))
        self.request = Request(generate, GATEWAY)

    def dispatch(self, node: Peer = FIRST) -> None:
        self.remote.dispatch(self.request, node, SLOTS)

    def take(self, node: Peer, message: PrefillMessage) -> list[Lost]:
        return self.lost_by(lambda: self.remote.take(node, message))

    def tick(self, now: float) -> list[Lost]:
        return self.lost_by(lambda: self.remote.tick(now))

    def lost_by(self, call: Callable[[], None]) -> list[Lost]:
        self.lost.clear()
        call()
        return list(self.lost)

    def outcomes(self, call: Callable[[], None]) -> list[Landed | Lost]:
        """What a call changed."""
        before = self.request.state
        lost = self.lost_by(call)
        has_landed = before is not self.request.state is RequestState.LANDED
        return [*lost, *([Landed(self.request)] if has_landed else [])]

    def done(
        self,
        epoch: int = 1,
        num_tokens: int = 3,
        checksums: Checksums = NO_CHECKSUMS,
        node: Peer = FIRST,
        chunks: int = 0,
        lingering: bool = False,
    ) -> list[Landed | Lost]:
        attempt = R._replace(epoch=epoch)
        message = PrefillDone(
            attempt=attempt, num_tokens=num_tokens, chunks=chunks, checksums=checksums, lingering=lingering
        )
        return self.outcomes(lambda: self.remote.take(node, message))

    def chunk(self, number: int, epoch: int = 1, node: Peer = FIRST) -> list[Landed | Lost]:
        """A chunk has landed. Whether that was answered, `taken` tells."""
        message = ChunkDone(attempt=R._replace(epoch=epoch), number=number, checksums=CHUNK_CHECKSUMS)
        return self.outcomes(lambda: self.remote.take(node, message))

    def taken(self) -> list[int]:
        """The chunks that need not be said again, since the last call."""
        answers = self.control.take(ChunkTaken)
        assert all(isinstance(answer, ChunkTaken) and answer.attempt.request_id == "r" for answer in answers)
        return [answer.number for answer in answers if isinstance(answer, ChunkTaken)]

    def verified(self, *mismatches: Mismatch, error: str | None = None) -> list[Landed | Lost]:
        """What came of the oldest verification."""
        oldest = self.verifier.waiting.pop(0)
        verified = Verified(oldest.attempt.id, oldest.chunk, len(CHECKSUMS), mismatches, error)
        return self.outcomes(lambda: self.remote.verified(verified))

    def accepted(self) -> None:
        self.take(FIRST, PrefillAccepted(attempt=R))

    def progress(self, computed: int = 0, current_pass: int | None = None) -> None:
        assert self.take(FIRST, Progress(computed=((R, computed),), current_pass=current_pass)) == []

    def wait(self, seconds: float) -> list[Lost]:
        """Time passes, in which both nodes are heard."""
        self.clock.now += seconds
        self.control.heard |= {"first": self.clock.now, "second": self.clock.now}
        return self.tick(self.clock.now)

    def answer(self, boot_id: str, asked_at: float) -> None:
        """Whoever has FIRST's address answers a ping that was sent then."""
        self.control.answers[FIRST.address] = AnsweredPing(boot_id, asked_at)

    def failures(self, reason: str) -> float:
        return float(self.metrics.transfer_failures.labels(reason)._value.get())


@pytest.fixture
def h(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(Clock(monkeypatch))


def test_slots_are_reserved_before_they_are_named(h: Harness) -> None:
    h.dispatch()
    assert h.table.is_writable(R)
    peer, message = h.control.repeated["prefill", R]
    assert peer == FIRST
    assert isinstance(message, PrefillRequest)
    assert (message.attempt, message.extents, message.hisparse) == (R, ((4, 3),), True)
    assert message.token_ids == (1, 2, 3), "all tokens but the last, which a decode step computes"
    assert message.destination == h.destination
    h.take(FIRST, PrefillAccepted(attempt=R))
    assert not h.control.repeated


def test_a_landed_prompt_takes_its_slots_along(h: Harness) -> None:
    h.dispatch()
    assert h.done() == [Landed(h.request)]
    assert h.request.state is RequestState.LANDED
    assert h.request.host_slots == SLOTS
    assert h.control.take(Admitted) == [Admitted(attempt=R)]
    assert h.remote.is_idle
    assert h.freed == []


def logprobs(start: int, stop: int) -> PromptLogprobs:
    rows = np.arange(start, stop)[:, None].repeat(3, axis=1)
    return PromptLogprobs.of(start, rows.astype(np.int32), -rows.astype(np.float32))


def test_log_probabilities_land_with_the_prompt_and_are_asked_for_until_then(h: Harness) -> None:
    generate = h.request.generate.model_copy(update={"prompt_logprobs": 2})
    h.request = Request(generate, GATEWAY)
    h.dispatch()
    [(_, asked)] = h.control.repeated.values()
    assert isinstance(asked, PrefillRequest)
    assert (asked.prompt_logprobs, asked.last_token_id) == (2, 4)
    chunk = ChunkDone(attempt=R, number=0, checksums=NO_CHECKSUMS, prompt_logprobs=(logprobs(1, 3),))
    h.take(FIRST, chunk)
    assert len(h.take(FIRST, PrefillFailed(attempt=R, reason="out of memory"))) == 1
    assert h.request.prompt_logprobs is None

    h.dispatch(SECOND)
    second = R._replace(epoch=2)
    h.take(SECOND, ChunkDone(attempt=second, number=0, checksums=NO_CHECKSUMS, prompt_logprobs=(logprobs(1, 3),)))
    done = PrefillDone(attempt=second, num_tokens=3, chunks=1, prompt_logprobs=(logprobs(3, 4),))
    assert h.outcomes(lambda: h.remote.take(SECOND, done)) == [Landed(h.request)]
    assert h.request.prompt_logprobs is not None
    assert h.request.prompt_logprobs.floats.tolist() == [[-1.0] * 3, [-2.0] * 3, [-3.0] * 3]

    h.request.move(RequestState.WAITING)
    h.request.host_slots = None
    h.control.repeated.clear()
    h.dispatch()
    [asked_again] = [message for key, (_, message) in h.control.repeated.items() if key[0] == "prefill"]  # type: ignore[index]
    assert isinstance(asked_again, PrefillRequest)
    assert (asked_again.prompt_logprobs, asked_again.last_token_id) == (None, None)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((logprobs(1, 3),), "missing"),
        ((logprobs(1, 5),), "of a prompt of 4 tokens"),
        ((PromptLogprobs.of(1, np.zeros((3, 3), np.int32), np.full((3, 3), np.inf, np.float32)),), "finite"),
    ],
)
def test_log_probabilities_that_cannot_be_cost_the_attempt(
    h: Harness, pieces: tuple[PromptLogprobs, ...], reason: str
) -> None:
    h.request = Request(h.request.generate.model_copy(update={"prompt_logprobs": 2}), GATEWAY)
    h.dispatch()
    [lost] = h.take(FIRST, PrefillDone(attempt=R, num_tokens=3, prompt_logprobs=pieces))
    assert reason in lost.reason


def test_log_probabilities_that_nobody_asked_for_cost_the_attempt(h: Harness) -> None:
    h.dispatch()
    [lost] = h.take(FIRST, PrefillDone(attempt=R, num_tokens=3, prompt_logprobs=(logprobs(1, 4),)))
    assert "not asked for" in lost.reason


def test_done_of_an_attempt_that_was_given_up_lands_nothing_but_ends_the_quarantine(h: Harness) -> None:
    h.dispatch()
    h.remote.abandon(h.request)
    assert h.freed == []
    assert h.done() == []
    assert h.freed == [SLOTS]
    assert h.control.take(Admitted) == [Admitted(attempt=R)]
    assert not h.control.repeated


def test_done_that_comes_twice_is_answered_twice_and_lands_once(h: Harness) -> None:
    h.dispatch()
    h.done()
    assert h.done() == []
    assert len(h.control.take(Admitted)) == 2


def test_done_of_an_old_epoch_does_not_land_in_the_new_one(h: Harness) -> None:
    h.dispatch()
    h.take(FIRST, PrefillFailed(attempt=R, reason="write failed"))
    h.dispatch(SECOND)
    assert h.done(epoch=1) == []
    assert h.request.state is RequestState.PREFILLING
    assert h.table.is_writable(R._replace(epoch=2))


def test_done_for_another_number_of_tokens_is_not_served(h: Harness) -> None:
    h.dispatch()
    [lost] = h.done(num_tokens=2)
    assert isinstance(lost, Lost)
    assert "2 tokens, not 3" in lost.reason


def test_an_abort_is_repeated_until_quiesced_and_frees_then(h: Harness) -> None:
    """sglang PRs 24580, 31357: pages freed on abort while the prefill node was still writing."""
    h.dispatch()
    h.remote.abandon(h.request)
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    assert h.remote.abandoned.num_slots == 3
    h.take(FIRST, Quiesced(attempt=R))
    assert h.freed == [SLOTS]
    assert not h.control.repeated


def test_a_failed_attempt_goes_to_a_node_that_was_not_tried(h: Harness) -> None:
    h.dispatch()
    [lost] = h.take(FIRST, PrefillFailed(attempt=R, reason="out of memory"))
    assert lost == Lost(h.request, "out of memory")
    assert h.freed == [SLOTS], "PrefillFailed says that nothing is in flight"
    assert h.request.state is RequestState.WAITING
    assert h.remote.nodes.choose(h.request) == SECOND


def test_a_node_that_leaves_hands_a_request_back_without_a_fault(h: Harness) -> None:
    """Were it counted, a rolling update would use up the attempts of what it meets."""
    for node in (FIRST, SECOND):
        h.dispatch(node)
        [lost] = h.take(node, PrefillFailed(attempt=R._replace(epoch=h.request.epoch), reason="draining", leaving=True))
        assert lost == Lost(h.request, "draining")
    assert h.freed == [SLOTS, SLOTS]
    assert h.request.prefill_attempts == 0
    assert h.failures("prefill") == 0
    assert h.remote.nodes.choose(h.request) is None, "neither takes another request"


def test_a_node_that_a_gateway_calls_leaving_is_not_asked_though_a_request_names_it(h: Harness) -> None:
    h.remote.nodes.retire(FIRST.boot_id)
    assert h.remote.nodes.choose(h.request) == SECOND
    again = FIRST.model_copy(update={"boot_id": "first again"})
    h.remote.nodes.learn(GATEWAY.address, (again, SECOND), {})
    assert h.remote.nodes.choose(h.request) == again, "the process that took its address is another one"


def test_a_node_whose_key_was_revoked_is_not_asked_even_if_it_is_the_only_one(h: Harness) -> None:
    """A request may name it, from before; it must not see another prompt."""
    h.control.revoked = {FIRST.boot_id}
    assert h.remote.nodes.choose(h.request) == SECOND
    h.control.revoked = {FIRST.boot_id, SECOND.boot_id}
    assert h.remote.nodes.choose(h.request) is None


def test_what_has_landed_is_not_lost_to_a_node_that_leaves_before_its_checksums_are_verified(h: Harness) -> None:
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    assert h.take(FIRST, PrefillFailed(attempt=R, reason="stopping", leaving=True)) == []
    assert h.verified() == [Landed(h.request)]


def test_a_pool_is_written_to_while_a_live_node_has_not_said_that_it_is_quiet(h: Harness) -> None:
    h.wait(0)
    h.dispatch()
    assert h.remote.abandoned.written_to
    h.remote.abandon(h.request)
    assert h.remote.abandoned.written_to
    h.clock.now += SILENCE_S + 1
    assert not h.remote.abandoned.written_to, "a dead node would keep this process from leaving"
    h.wait(0)
    h.take(FIRST, Quiesced(attempt=R))
    assert not h.remote.abandoned.written_to


def test_when_all_were_tried_the_best_is_tried_again(h: Harness) -> None:
    for node in (FIRST, SECOND):
        h.dispatch(node)
        h.take(node, PrefillFailed(attempt=R._replace(epoch=h.request.epoch), reason="no"))
    assert h.remote.nodes.choose(h.request) == FIRST


def test_a_failure_with_writes_in_flight_lifts_no_quarantine_until_the_node_is_quiet(h: Harness) -> None:
    """A failed call proves nothing about its other descriptors: they may land a second later."""
    h.dispatch()
    failed = PrefillFailed(attempt=R, reason="write failed", in_flight=True)
    [lost] = h.take(FIRST, failed)
    assert lost == Lost(h.request, "write failed")
    assert h.remote.nodes.choose(h.request) == SECOND, "the request does not wait for the old attempt's writes"
    assert h.take(FIRST, failed) == []
    assert h.freed == []
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    h.take(FIRST, Quiesced(attempt=R))
    assert h.freed == [SLOTS]
    assert not h.control.repeated


def test_a_failure_with_writes_in_flight_may_be_settled_by_a_later_one_without(h: Harness) -> None:
    h.dispatch()
    h.take(FIRST, PrefillFailed(attempt=R, reason="write failed", in_flight=True))
    h.take(FIRST, PrefillFailed(attempt=R, reason="write failed"))
    assert h.freed == [SLOTS]


GONE = AttemptId("decode", "gone", 4)


def test_a_failure_of_what_is_settled_here_is_answered_with_an_abort(h: Harness) -> None:
    """It is repeated until one comes, and the reservation may have been evicted meanwhile."""
    h.take(FIRST, PrefillFailed(attempt=GONE, reason="write failed", in_flight=True))
    assert h.control.take(Abort) == [Abort(attempt=GONE)]


def test_a_silent_node_loses_its_requests_but_not_their_slots(h: Harness) -> None:
    """Silence is no proof of death."""
    h.dispatch()
    now = time.monotonic() + SILENCE_S + 1
    [lost] = h.tick(now)
    assert isinstance(lost, Lost)
    assert "silent" in lost.reason
    assert h.freed == []
    assert h.remote.abandoned.num_slots == 3
    assert h.remote.nodes.choose(h.request) == SECOND
    assert FIRST in h.control.watched, "it is listened to, to notice that it is back"


def test_a_node_that_was_silent_is_used_again_as_soon_as_it_answers_and_not_before(h: Harness) -> None:
    """sglang 13054: nothing is sticky. But each try would leave its slots in quarantine."""
    h.dispatch()
    h.clock.now += SILENCE_S + 1
    h.tick(h.clock.now)
    h.request.tried.clear()
    h.control.heard["first"] = h.clock.now + 1
    assert h.remote.nodes.choose(h.request) == SECOND, "what it said may be old"
    h.clock.now += 1000
    assert h.remote.nodes.choose(h.request) == SECOND, "time alone does not make it well"
    h.control.alive["first"] = h.clock.now
    assert h.remote.nodes.choose(h.request) == FIRST


def test_a_node_that_is_heard_is_not_silent(h: Harness) -> None:
    h.dispatch()
    now = time.monotonic() + 50
    h.control.heard["first"] = now - 1
    assert h.tick(now) == []
    assert h.request.state is RequestState.PREFILLING


def test_a_restart_of_the_writer_proves_it_dead(h: Harness) -> None:
    h.dispatch()
    h.answer("reborn", asked_at=h.clock.now + 1)
    h.clock.now += 2
    [lost] = h.tick(h.clock.now)
    assert isinstance(lost, Lost)
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


def test_a_late_word_of_the_process_before_the_writer_proves_nothing(h: Harness) -> None:
    """It had the same address. Whatever it said or answered was before the slots were named to its successor."""
    h.answer("the one before", asked_at=h.clock.now - 1)
    h.dispatch()
    assert h.wait(1) == []
    assert h.take(FIRST.model_copy(update={"boot_id": "the one before"}), Quiesced(attempt=R)) == []
    assert h.table.is_writable(R)
    h.remote.abandon(h.request)
    for _ in range(100):
        h.wait(1)
    assert h.freed == []
    assert h.remote.abandoned.num_slots == 3


def test_of_two_processes_with_one_address_the_one_that_is_heard_is_not_dead(h: Harness) -> None:
    """A mistake, as of two pods behind one name. It costs attempts, but frees no slots that may be written to."""
    h.dispatch()
    h.remote.abandon(h.request)
    for _ in range(100):
        h.answer("another", asked_at=h.clock.now + 0.5)
        h.wait(1)
    assert h.freed == []
    h.take(FIRST, Quiesced(attempt=R))
    assert h.freed == [SLOTS]


def test_another_process_at_the_address_does_not_speak_for_the_writer(h: Harness) -> None:
    h.dispatch()
    h.remote.abandon(h.request)
    reborn = FIRST.model_copy(update={"boot_id": "reborn"})
    h.take(reborn, Quiesced(attempt=R))
    h.clock.now += 100
    h.tick(h.clock.now)
    assert h.freed == []


@pytest.mark.parametrize("said", ["quiesced", "failed"])
def test_what_may_linger_in_the_network_is_waited_for_and_not_asked_about_again(h: Harness, said: str) -> None:
    """The writer is done: only time, and a fence, can say more."""
    h.dispatch()
    if said == "quiesced":
        h.remote.abandon(h.request)
        h.take(FIRST, Quiesced(attempt=R, lingering=True))
    else:
        failed = PrefillFailed(attempt=R, reason="a write failed", lingering=True)
        assert len(h.take(FIRST, failed)) == 1
    assert h.freed == []
    assert not h.control.repeated
    h.tick(time.monotonic() + DRAIN_GRACE_S + 1)
    assert h.freed == [SLOTS]


def test_a_prompt_of_which_something_lingers_lands_and_its_slots_are_fenced_before_others_get_them(h: Harness) -> None:
    """What was cut and posted again arrived once more, after the request had ended."""
    h.dispatch()
    [landed] = h.done(lingering=True)
    assert isinstance(landed, Landed)
    assert h.request.host_slots == SLOTS
    assert h.retained == [SLOTS], "free when the request and the fence have both let go"
    assert h.control.take(Admitted) == [Admitted(attempt=R)]
    assert h.done(lingering=True) == []
    assert not h.remote.abandoned.written_to, "the node writes no more: nobody need wait for it"
    assert not h.remote.is_idle
    assert h.remote.abandoned.num_slots == 0, "the request uses them"
    h.wait(DRAIN_GRACE_S + LANDED_CAN_WAIT_S - 1)
    assert h.freed == []
    h.wait(1)
    assert h.freed == [SLOTS]
    assert h.remote.is_idle


def test_done_of_an_attempt_that_was_given_up_ends_the_quarantine_behind_a_fence_if_something_lingers(
    h: Harness,
) -> None:
    h.dispatch()
    h.remote.abandon(h.request)
    assert h.done(lingering=True) == []
    assert h.freed == []
    assert not h.control.repeated
    h.wait(DRAIN_GRACE_S + 1)
    assert h.freed == [SLOTS]


def test_the_restart_of_another_node_proves_nothing(h: Harness) -> None:
    h.dispatch()
    h.control.answers[SECOND.address] = AnsweredPing("reborn", h.clock.now + 0.5)
    assert h.wait(1) == []
    assert h.table.is_writable(R)


# --- a node that answers and does not get on ---


def test_a_request_that_is_never_accepted_is_given_up(h: Harness) -> None:
    """Dropped as malformed, say. The node is asked for others as soon as it answers anything."""
    h.dispatch()
    assert h.wait(PATIENCE_S - 1) == []
    [lost] = h.wait(2)
    assert isinstance(lost, Lost)
    assert lost.reason == "prefill node 127.0.0.1:2 has not accepted it for 60 s"
    assert ("prefill", R) not in h.control.repeated
    h.request.tried.clear()
    assert h.remote.nodes.choose(h.request) == SECOND
    h.take(FIRST, Progress(current_pass=4))
    assert h.remote.nodes.choose(h.request) == FIRST


def test_a_node_that_hangs_in_a_forward_pass_is_as_good_as_dead_until_it_goes_on(h: Harness) -> None:
    """Its other threads answer pings and messages as ever."""
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {})
    h.dispatch()
    h.accepted()
    h.progress(current_pass=7)
    for _ in range(int(PATIENCE_S)):
        assert h.wait(1) == []
        h.progress(current_pass=7)
    [lost] = h.wait(1)
    assert isinstance(lost, Lost)
    assert lost.reason == "prefill node 127.0.0.1:2 has made no progress for 60 s"
    assert h.remote.abandoned.num_slots == 3
    h.request.tried.clear()
    assert h.remote.nodes.choose(h.request) == SECOND
    h.control.sent.clear()
    h.wait(1)
    assert (FIRST, Holding()) in h.control.sent, "it is asked, though nothing of this node is there"
    h.take(FIRST, Progress(current_pass=7))
    assert h.remote.nodes.choose(h.request) == SECOND
    h.take(FIRST, Progress(current_pass=None))
    assert h.remote.nodes.choose(h.request) == FIRST


def test_a_request_gets_on_while_chunks_of_it_or_of_others_are_computed_or_it_is_sent(h: Harness) -> None:
    h.dispatch()
    h.accepted()
    for computed, current_pass in ((0, 1), (0, 2), (2, 2), (3, None), (3, None), (3, None)):
        assert h.wait(PATIENCE_S - 1) == []
        h.progress(computed, current_pass)
    h.wait(PATIENCE_S + 1)
    assert h.request.state is RequestState.WAITING, "not even that it is being sent was heard any more"


def test_progress_that_another_node_claims_is_none(h: Harness) -> None:
    h.dispatch()
    h.accepted()
    for number in range(10):
        h.take(SECOND, Progress(computed=((R, 1),), current_pass=number))
        h.wait(PATIENCE_S / 9)
    assert h.request.state is RequestState.WAITING


def test_a_node_that_does_not_know_an_accepted_request_has_lost_it(h: Harness) -> None:
    h.dispatch()
    h.accepted()
    h.wait(0)
    assert h.control.take(Holding) == [Holding(attempts=(R,))]
    [lost] = h.take(FIRST, NotHeld(attempts=(R,)))
    assert isinstance(lost, Lost)
    assert h.freed == [SLOTS]


def test_gateways_name_nodes_that_the_request_did_not(h: Harness) -> None:
    request = Request(Generate(request_id="q", prompt_ids=(1,), max_new_tokens=1), GATEWAY)
    assert h.remote.nodes.choose(request) is None
    h.remote.nodes.learn(GATEWAY.address, (SECOND,), {})
    assert h.remote.nodes.choose(request) == SECOND


def test_a_ranking_from_before_a_restart_is_brought_up_to_date(h: Harness) -> None:
    reborn = FIRST.model_copy(update={"boot_id": "reborn"})
    h.remote.nodes.learn(GATEWAY.address, (reborn,), {})
    assert h.remote.nodes.choose(h.request) == reborn


def test_a_gateway_that_died_does_not_keep_the_old_boot_of_a_node_alive(h: Harness) -> None:
    """What it said last is older than what another gateway says, whichever spoke first."""
    reborn = FIRST.model_copy(update={"boot_id": "reborn"})
    h.remote.nodes.learn(GATEWAY.address, (FIRST,), {})
    h.remote.nodes.learn("gateway:2", (FIRST,), {})
    h.remote.nodes.learn(GATEWAY.address, (reborn,), {})
    assert h.remote.nodes.choose(h.request) == reborn


def test_what_a_silent_gateway_said_is_forgotten_when_others_speak(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    h.remote.nodes.learn("gateway:2", (SECOND,), {})
    h.remote.nodes.learn(GATEWAY.address, (FIRST,), {})
    assert h.remote.nodes.known == {FIRST, SECOND}
    later = time.monotonic() + 60
    monkeypatch.setattr("decode_node.prefill_nodes.time.monotonic", lambda: later)
    assert h.remote.nodes.known == {FIRST, SECOND}, "while nobody speaks"
    h.remote.nodes.learn(GATEWAY.address, (FIRST,), {})
    assert h.remote.nodes.known == {FIRST}


def test_nodes_that_take_so_long_a_prompt_are_asked_even_if_others_are_idle(h: Harness) -> None:
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {"first": 2, "second": 3})
    assert h.remote.nodes.choose(h.request) == SECOND
    h.remote.health.suspect(SECOND, time.monotonic())
    assert h.remote.nodes.choose(h.request) is None, "it waits for the node that can"
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {"first": 2, "second": 2})
    assert h.remote.nodes.choose(h.request) == FIRST, "nobody can, which it will say"


# --- checksums ---


def test_nothing_lands_before_its_checksums_are_verified(h: Harness) -> None:
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


def test_what_has_landed_is_not_lost_to_a_node_that_fails_before_its_checksums_are_verified(h: Harness) -> None:
    """It gave up on a decode node that was silent for a while, say. Nothing depends on it any more."""
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    for in_flight in (True, False):
        failed = PrefillFailed(attempt=R, reason="the decode node is silent", in_flight=in_flight)
        assert h.take(FIRST, failed) == []
    assert h.verified() == [Landed(h.request)]
    assert h.freed == []


def test_only_the_node_that_was_asked_ends_an_attempt(h: Harness) -> None:
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


def test_done_that_is_repeated_while_it_is_verified_is_verified_once(h: Harness) -> None:
    h.dispatch()
    for _ in range(3):
        assert h.done(checksums=CHECKSUMS) == []
    assert len(h.verifier.waiting) == 1
    assert len(h.verified()) == 1


def test_a_mismatch_is_never_served_and_the_retry_goes_to_the_other_node_with_a_new_epoch(h: Harness) -> None:
    """vllm 44238, sglang 23020: corruption under concurrent transfers."""
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    [lost] = h.verified(Mismatch(Checksum(1, 0, 3, 12), 13, ((0x1000, 48),)))
    assert lost == Lost(h.request, "1 of 2 checksums do not match")
    assert h.request.state is RequestState.WAITING
    assert h.request.host_slots is None
    assert h.control.take(Admitted) == []
    assert h.failures("checksum") == 1
    assert h.remote.abandoned.num_slots == 3
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    assert h.remote.nodes.choose(h.request) == SECOND
    h.dispatch(SECOND)
    assert h.request.epoch == 2
    h.take(FIRST, Quiesced(attempt=R))
    assert h.freed == [SLOTS]


def test_what_cannot_be_verified_is_not_served_either(h: Harness) -> None:
    h.dispatch()
    h.done(checksums=CHECKSUMS)
    [lost] = h.verified(error="out of memory")
    assert lost == Lost(h.request, "checksums could not be verified: out of memory")
    assert h.failures("verification") == 1
    assert h.failures("checksum") == 0


def test_the_result_for_a_request_that_was_given_up_meanwhile_is_dropped(h: Harness) -> None:
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


def test_when_the_verifier_is_busy_the_repeated_message_is_offered_again(h: Harness) -> None:
    h.verifier.room = 0
    h.dispatch()
    assert h.done(checksums=CHECKSUMS) == []
    h.verifier.room = 1
    assert h.done(checksums=CHECKSUMS) == []
    assert len(h.verified()) == 1


def test_a_node_that_dies_after_its_last_write_costs_nothing(h: Harness) -> None:
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


def test_a_mismatch_after_the_writers_death_is_free_after_the_grace(h: Harness) -> None:
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


def test_done_by_a_node_that_was_not_asked_lands_nothing(h: Harness) -> None:
    h.dispatch(FIRST)
    assert h.done(node=SECOND) == []
    assert h.request.state is RequestState.PREFILLING
    assert len(h.done()) == 1


# --- checksums, chunk by chunk ---


def test_a_chunk_is_verified_before_the_last_has_landed(h: Harness) -> None:
    h.dispatch()
    assert h.chunk(0) == []
    [waiting] = h.verifier.waiting
    assert (waiting.attempt.id, waiting.chunk, waiting.checksums) == (R, 0, CHUNK_CHECKSUMS)
    assert (waiting.attempt.slots, waiting.attempt.num_tokens) == (SLOTS, 3)
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
def test_a_prompt_lands_when_all_of_it_is_said_and_verified_in_whatever_order(
    h: Harness, order: tuple[str, ...], at_once: bool
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


def test_a_mismatch_in_an_early_chunk_fails_the_attempt_at_once(h: Harness) -> None:
    h.dispatch()
    h.chunk(0)
    h.chunk(1)
    [lost] = h.verified(Mismatch(Checksum(0, 0, 1, 13), 14, ((0x1000, 16),)))
    assert lost == Lost(h.request, "1 of 2 checksums do not match")
    assert h.failures("checksum") == 1
    assert h.remote.abandoned.num_slots == 3
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


def test_a_chunk_that_cannot_be_verified_fails_the_attempt(h: Harness) -> None:
    h.dispatch()
    h.chunk(0)
    assert h.verified(error="out of memory") == [
        Lost(h.request, "checksums could not be verified: out of memory"),
    ]
    assert h.failures("verification") == 1


def test_a_chunk_of_an_old_epoch_says_nothing_of_the_new_one(h: Harness) -> None:
    h.dispatch()
    h.take(FIRST, PrefillFailed(attempt=R, reason="write failed"))
    h.dispatch()
    assert h.chunk(0, epoch=1) == []
    assert h.taken() == [0]
    assert h.verifier.waiting == []
    h.done(epoch=2, chunks=1, checksums=CHECKSUMS)
    assert h.verified() == [], "its own chunk is still to come"
    h.chunk(0, epoch=2)
    assert h.verified() == [Landed(h.request)]


def test_a_chunk_that_comes_when_the_prompt_has_landed_is_answered(h: Harness) -> None:
    """Its answer was lost, and the node has not heard Admitted yet."""
    h.dispatch()
    h.chunk(0)
    h.done(chunks=1)
    h.verified()
    h.taken()
    assert h.chunk(0) == []
    assert h.taken() == [0]
    assert h.verifier.waiting == []


def test_a_chunk_by_a_node_that_was_not_asked_is_not_taken(h: Harness) -> None:
    h.dispatch(FIRST)
    assert h.chunk(0, node=SECOND) == []
    assert h.verifier.waiting == []
    assert h.taken() == []


def test_when_the_verifier_is_busy_a_chunk_is_not_answered_and_offered_again(h: Harness) -> None:
    h.verifier.room = 1
    h.dispatch()
    h.chunk(0)
    h.chunk(1)
    assert h.taken() == [0]
    h.done(chunks=2)
    assert h.verified() == []
    h.chunk(1)
    assert h.taken() == [1]
    assert h.verified() == [Landed(h.request)]


def test_a_prompt_whose_chunk_was_lost_waits_for_its_repeat(h: Harness) -> None:
    h.dispatch()
    h.accepted()
    h.progress(computed=3)
    h.done(chunks=2, checksums=CHECKSUMS)
    assert h.verified() == []
    for chunk in range(2):
        assert h.wait(PATIENCE_S - 1) == []
        assert h.control.take(Holding)[-1] == Holding(attempts=(R,)), "the node is still asked"
        h.progress(computed=3)
        assert h.request.state is RequestState.PREFILLING
        h.chunk(chunk)
    assert h.verified() == []
    assert h.verified() == [Landed(h.request)]


def test_a_chunk_that_a_living_node_never_speaks_of_is_not_waited_for_for_ever(h: Harness) -> None:
    """It says that everything landed, and repeats that it holds the request, but not what was in one chunk."""
    h.dispatch()
    h.accepted()
    h.progress(computed=3)
    h.done(chunks=1, checksums=CHECKSUMS)
    assert h.verified() == []
    for _ in range(int(PATIENCE_S) - 1):
        assert h.wait(1) == []
        h.progress(computed=3)
    [lost] = h.wait(2)
    assert isinstance(lost, Lost)
    assert lost.reason == "prefill node 127.0.0.1:2 has made no progress for 60 s"
    assert h.remote.abandoned.num_slots == 3


@pytest.mark.parametrize("end", ["silent", "restarted", "not held", "failed", "leaving"])
def test_a_prompt_whose_chunk_was_lost_with_its_node_is_lost(h: Harness, end: str) -> None:
    """That all has landed was said, but not with which checksums."""
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


def test_a_node_that_dies_when_it_has_said_everything_costs_nothing_though_nothing_is_verified(h: Harness) -> None:
    h.dispatch()
    h.chunk(0)
    h.done(chunks=1, checksums=CHECKSUMS)
    h.clock.now += SILENCE_S + 1
    assert h.tick(h.clock.now) == []
    assert h.verified() == []
    assert h.verified() == [Landed(h.request)]


def test_a_node_that_contradicts_itself_is_not_served(h: Harness) -> None:
    h.dispatch()
    h.chunk(1)
    [lost] = h.done(chunks=1)
    assert lost == Lost(h.request, "chunk 1 landed, of 1 that there can be")
    assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))


# --- nodes of several ranks ---

RANKS = tuple(Peer(role="prefill", address=f"127.0.0.1:{port}", boot_id=f"first-{port}") for port in (12, 22))


def dispatch_to_a_group(h: Harness) -> None:
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {}, {"first": RANKS})
    h.dispatch()


def test_every_rank_of_a_node_is_a_writer_before_slots_are_named(h: Harness) -> None:
    dispatch_to_a_group(h)
    _, request = h.control.repeated["prefill", R]
    assert isinstance(request, PrefillRequest)
    assert request.ranks == ("first-12", "first-22")
    h.tick(h.clock.now)
    assert h.control.watched == {FIRST, SECOND, *RANKS}


def test_a_request_brings_the_ranks_of_a_node_that_gateways_do_not_list_any_more(h: Harness) -> None:
    ranked = h.request.generate.model_copy(update={"prefill_ranks": {"first": RANKS}})
    assert h.remote.nodes.ranks_of(FIRST, Request(ranked, GATEWAY)) == RANKS
    assert h.remote.nodes.ranks_of(SECOND, Request(ranked, GATEWAY)) == ()


def test_a_restarted_node_whose_old_rank_lives_on_proves_nothing_of_that_rank(h: Harness) -> None:
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
        assert h.remote.abandoned.num_slots == 3
        h.control.answers[peer.address] = AnsweredPing("another", h.clock.now)
        h.clock.now += 1
    h.tick(h.clock.now)
    h.tick(h.clock.now + DRAIN_GRACE_S)
    assert h.freed == [SLOTS]


def test_a_rank_does_not_speak_for_its_node(h: Harness) -> None:
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
