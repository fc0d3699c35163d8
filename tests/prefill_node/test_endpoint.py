"""The prefill node's side of the protocol: idempotent, and never quiet too early."""

import time
from typing import Any

import pytest
import structlog

from control.messages import (
    Abort,
    Admitted,
    AttemptId,
    Holding,
    NotHeld,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    Progress,
    Quiesced,
)
from prefill_node.attempt import HeldState
from prefill_node.lanes import DecodeNodes
from prefill_node.offer import Offer
from prefill_node.planner import MAX_DECODE_NODES
from tests.identity import IDENTITY
from tests.prefill_node.fakes import FakeControl
from tests.prefill_node.world import DECODE, R, World, destination, request
from tests.work import calls_of
from transfer.memory import BufferInfo, Session


def test_done_is_said_after_the_last_write_and_repeated_until_admitted() -> None:
    h = World.sending()
    h.sent()
    assert not h.control.repeated
    h.sent()
    [(peer, done)] = h.control.repeated.values()
    assert peer == DECODE
    assert isinstance(done, PrefillDone)
    assert (done.num_tokens, done.transferred_bytes, done.lingering) == (10, 20, False)
    assert (done.chunks, len(done.checksums)) == (0, 0), "without checksums no chunk is told of"
    assert h.free_pages == 5, "pages are kept until the decode node has admitted the request"
    h.receive(Admitted(attempt=R))
    assert not h.control.repeated
    assert h.free_pages == 8


def test_a_repeated_request_is_answered_and_computed_once() -> None:
    h = World()
    h.receive(request())
    h.receive(request())
    assert len(h.control.take(PrefillAccepted)) == 2
    assert h.prefill.queued_tokens == 10


@pytest.mark.parametrize("world_size", [1, 3])
def test_quiesced_is_said_only_when_no_write_is_in_flight(world_size: int) -> None:
    """sglang PRs 24580, 31357: a late write after an abort corrupted another request."""
    h = World.sending(world_size)
    for _ in range(2):
        h.endpoint._take(DECODE, Abort(attempt=R))
    for rank, worker in enumerate(h.workers):
        assert {write.work for write in worker.writes} <= worker.cancelled
        while worker.writes:
            h.tell()
            assert (h.control.take(Quiesced), h.free_pages) == ([], 5)
            h.sent(rank, error="aborted", lingering=rank == 2)
    quiesced = Quiesced(attempt=R, lingering=world_size == 3)
    assert (h.control.take(Quiesced), h.free_pages) == ([quiesced], 8)
    h.receive(Abort(attempt=R))
    assert h.control.take(Quiesced) == [quiesced]


def test_a_late_repeat_of_an_aborted_request_is_not_started() -> None:
    h = World()
    for _ in range(2):
        h.receive(Abort(attempt=R))
    assert len(h.control.take(Quiesced)) == 2
    h.receive(request())
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]
    assert h.prefill.queued_tokens == 0
    h.receive(request(attempt=R._replace(epoch=2)))
    assert h.prefill.queued_tokens == 10, "the next epoch is another request"


def test_a_request_that_moved_to_another_decode_node_is_another_one() -> None:
    """Its first decode node fell silent, and a write to that one takes a minute to fail: the second must not wait."""
    h = World()
    second = Peer(role="decode", address="127.0.0.1:2", boot_id="second")
    h.receive(request())
    h.compute()
    theirs = R._replace(decode="second")
    h.receive(request(attempt=theirs), sender=second)
    assert len(h.held) == 2
    h.receive(Abort(attempt=theirs), sender=second)
    assert h.control.sent.pop() == (second, Quiesced(attempt=theirs))
    assert not h.is_cancelled(h.writes[0]), "the first one's own affair"
    h.receive(Holding(attempts=(theirs,)), sender=second)
    assert h.control.sent.pop() == (second, NotHeld(attempts=(theirs,)))
    h.control.sent.clear()
    h.receive(Holding(attempts=(R, AttemptId("decode", "other", 3))))
    assert h.control.take(NotHeld) == [NotHeld(attempts=(AttemptId("decode", "other", 3),))]
    assert h.control.take(Progress) == [Progress(computed=((R, 6),))]


def test_an_abort_during_a_step_is_answered_when_the_step_ends() -> None:
    h = World()
    h.receive(request())
    h.start()
    h.receive(Abort(attempt=R))
    assert h.is_cancelled(h.writes[0])
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == [], "the forward pass still writes to its pages"
    assert h.free_pages == 5
    h.finish()
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]
    assert h.free_pages == 8
    h.start()
    assert h.step is None


def test_a_transfer_that_takes_too_long_is_given_up() -> None:
    h = World()
    h.receive(request(token_ids=(1, 2), extents=((0, 2),)))
    h.compute()
    now = time.monotonic()
    h.housekeep(now + 29)
    assert not h.control.repeated
    h.housekeep(now + 31)
    failed = h.only(PrefillFailed)
    assert failed.in_flight
    assert "transfer took longer than 30 s" in failed.reason
    h.receive(Abort(attempt=R))
    assert not h.control.repeated
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]


def test_more_decode_nodes_than_there_may_be_threads_are_refused_by_name() -> None:
    h = World()
    for number in range(MAX_DECODE_NODES):
        decode = Peer(role="decode", address=f"{number}:1", boot_id=str(number))
        h.receive(request(attempt=AttemptId(decode.boot_id, "r", 1)), sender=decode)
    h.receive(request())
    [failed] = h.control.take(PrefillFailed)
    assert "as many decode nodes as it can" in failed.reason


def test_neither_a_request_nor_a_turn_takes_longer_if_many_wait() -> None:
    """Of 128 decode nodes thousands may."""
    requests, turns = [], []
    for number in (20, 200):
        h = World()
        for each in range(number):
            h.receive(request(attempt=R._replace(request_id=f"r{each}")))
        h.start()
        requests.append(calls_of(lambda: h.endpoint._take(DECODE, request())))  # noqa: B023
        turns.append(calls_of(h.start))
    # Logs and looks by the clock differ by some calls, each of 180 more by one at least.
    assert abs(requests[1] - requests[0]) < 90
    assert abs(turns[1] - turns[0]) < 90


def test_a_node_says_how_far_it_is_and_which_pass_computes() -> None:
    """Of a device that hangs, the number stays as it is."""
    h = World()
    h.receive(request())

    def progress() -> tuple[int, int | None]:
        h.receive(Holding(attempts=(R,)))
        [said] = h.control.take(Progress)
        assert isinstance(said, Progress)
        [(attempt, computed)] = said.computed
        assert attempt == R
        return computed, said.current_pass

    seen = [progress()]
    for _ in range(2):
        h.start()
        seen.append(progress())
        h.finish()
        seen.append(progress())
    assert seen == [(0, None), (0, 1), (6, None), (6, 2), (10, None)]
    assert len(h.held) == 1, "it is being sent"


def test_a_silent_decode_node_is_given_up_and_that_is_said_once() -> None:
    h = World()
    h.control.heard[DECODE.boot_id] = now = time.monotonic()
    h.receive(request())
    assert h.control.watched == {DECODE}, "at once: its first layer would wait for the lease"
    h.start()
    h.housekeep(now + 9)
    assert not h.is_cancelled(h.writes[0])
    with structlog.testing.capture_logs() as logs:
        for seconds in (11, 13, 15):
            h.housekeep(now + seconds)
    assert [line["event"] for line in logs] == ["decode node is silent"]
    assert h.is_cancelled(h.writes[0])


def test_nothing_is_written_to_pools_that_were_not_offered_before() -> None:
    h = World()
    h.receive(request())
    elsewhere = destination(sessions=(Session(transport="tcp", name="another-host:1"),))
    h.receive(request(attempt=R._replace(request_id="other"), destination=elsewhere))
    [failed] = h.control.take(PrefillFailed)
    assert "offered another destination before: sessions changed" in failed.reason
    assert len(h.held) == 1
    h.compute()
    assert {write.attempt.request_id for write in h.writes} == {"r"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hisparse": False}, "hisparse=false"),
        ({"token_ids": (1,) * 33, "extents": ((0, 33),)}, "prompt of 33 tokens; this node takes up to 32"),
        ({"token_ids": (100,)}, "token id 100 is outside the vocabulary of 100"),
        (
            {"destination": destination(identity=IDENTITY.model_copy(update={"dtype": "bfloat16"}))},
            "dtype float32 != bfloat16",
        ),
        (
            {"destination": destination(sessions=(Session(transport="rdma", name="a:1"),))},
            "no transport in common: tcp here, rdma at the decode node",
        ),
        (
            {"destination": destination(buffers=BufferInfo(ptrs=(1,), lengths=(160,), item_lengths=(16,)))},
            "destination item lengths",
        ),
    ],
)
def test_what_this_node_cannot_do_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    """sglang PR 21591: a relaxed check could hide a real mismatch."""
    h = World(max_tokens=32)
    h.receive(request(**changes))
    [failed] = h.control.take(PrefillFailed)
    assert reason in failed.reason
    assert len(h.held) == 0


def test_a_step_that_cannot_be_computed_costs_its_requests_and_no_others() -> None:
    h = World()
    h.receive(request())
    h.start()
    h.finish(error="prefill failed: out of memory")
    h.sent(error="aborted")
    [failed] = h.control.take(PrefillFailed)
    assert "out of memory" in failed.reason
    assert h.free_pages == 8
    h.receive(request(attempt=R._replace(epoch=2)))
    h.compute()
    h.compute()
    assert len(h.held) == 1


def test_transfer_seconds_are_those_in_which_something_was_being_written() -> None:
    h = World.sending()
    h.sent(posted_at=100.0, ended_at=110.0, waited=2.0)
    h.sent(posted_at=109.0, ended_at=115.0, waited=1.0)
    done = h.only(PrefillDone)
    assert done.transfer_seconds == 8.0 + 4.0


def test_a_prompt_waits_in_host_memory() -> None:
    """A copy to the device from the loop waits for the chunk that computes, and one that fails ends the node."""
    h = World()
    h.prefill.pool.kv = h.prefill.pool.kv.to("meta")
    h.receive(request())
    h.prefill.start_waiting()
    step = h.prefill.plan()
    assert step is not None
    [(job, chunk)] = step.chunks
    assert {job.token_ids.device.type, chunk.token_ids.device.type} == {"cpu"}


def test_what_landed_is_not_computed_again() -> None:
    h = World()
    h.receive(request(token_ids=(1, 2), extents=((0, 2),)))
    h.compute()
    h.sent()
    [attempt] = h.held.values()
    for state in (HeldState.COMPUTING, HeldState.SENDING, HeldState.SENT):
        with pytest.raises(RuntimeError, match=f"is sent and cannot become {state.value}"):
            attempt.move(state)
    attempt.move(HeldState.STOPPING)
    with pytest.raises(RuntimeError, match="is stopping and cannot become sent"):
        attempt.move(HeldState.SENT)


def test_a_node_refuses_slots_that_are_not_reserved_for_all_of_its_ranks() -> None:
    """A rank that the decode node does not know could write to them when they have been given away."""
    offer = Offer(IDENTITY, ("tcp",), max_tokens=32, vocab_size=100, ranks=("b", "c"))
    assert offer.rejection_reason(request(ranks=("c", "b"))) is None
    for ranks, missing in ((("b", "other"), "c"), ((), "b, c")):
        found = offer.rejection_reason(request(ranks=ranks))
        assert found == f"the slots are not reserved for ranks {missing} of this node"


def test_a_decode_node_is_watched_for_a_minute_after_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Peer(role="decode", address=f"127.0.0.1:{port}", boot_id=f"{port}") for port in (1, 2))
    now = 1000.0
    monkeypatch.setattr("prefill_node.lanes.time.monotonic", lambda: now)
    control = FakeControl()
    nodes = DecodeNodes(control)  # type: ignore[arg-type]
    nodes.watch([first, first])
    assert control.watched == {first}
    now += 30
    nodes.watch([second])
    assert control.watched == {first, second}
    now += 31
    nodes.watch([])
    assert control.watched == {second}, "it will probably come back, and its next prompt would wait"
    now += 31
    nodes.watch([])
    assert control.watched == set()
