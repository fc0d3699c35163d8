"""The prefill node's side of the protocol: idempotent, and never quiet too early."""

import math
import queue
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from base.metrics import Metrics
from control.messages import (
    Abort,
    Admitted,
    AttemptId,
    BufferInfo,
    Checksum,
    Checksums,
    ChunkDone,
    ChunkTaken,
    Destination,
    FetchDone,
    FetchGrant,
    FetchRefused,
    FetchRequest,
    Holding,
    Message,
    NotHeld,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Progress,
    Quiesced,
    Session,
)
from control.prompt_logprobs import PromptLogprobTable
from engine.chunked import ChunkedPrefill, PrefillStep
from engine.device import DeviceFailed
from engine.paged_pool import PagedKVPool
from prefill_node import endpoint
from prefill_node.compute import Computed
from prefill_node.endpoint import PrefillEndpoint
from prefill_node.fetcher import FetchResources
from prefill_node.job import JobState, TransferJob
from prefill_node.model_engine import EngineParts, ModelEngine
from prefill_node.offer import Offer
from prefill_node.outgoing import Chunk, SendReport
from prefill_node.progress import ForwardProgress
from prefill_node.sender import SendResources
from service.lifecycle import Lifecycle
from tests.identity import IDENTITY
from tests.prefill_node.fakes import LAYOUT, FakeControl, FakeModel

DECODE = Peer(role="decode", address="127.0.0.1:9", boot_id="decode")
TCP = (Session(transport="tcp", name="127.0.0.1:1"),)
BUFFERS = BufferInfo(ptrs=(1, 2, 3), lengths=(1600, 1600, 800), item_lengths=(16, 16, 8))
R = AttemptId("decode", "r", 1)


def checksum_of(start: int, stop: int) -> Checksum:
    return Checksum(buffer=0, start=start, stop=stop, digest=stop)


class HeldSender:
    """Keeps chunks until the test says that their writes ended."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

        self.full = False

    def submit(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def open(self, decode: Peer) -> bool:
        return not self.full

    def keep_only(self, boot_ids: set[str]) -> None:
        pass


class HeldCompute:
    """Keeps the step until the test computes it."""

    def __init__(self) -> None:
        self.step: PrefillStep[TransferJob] | None = None

    def start(self, step: PrefillStep[TransferJob]) -> ForwardProgress:
        assert self.step is None, "one step at a time"
        self.step = step
        return ForwardProgress(torch.device("cpu"))


class Harness:
    def __init__(self) -> None:
        self.control = FakeControl(heard={DECODE.boot_id: math.inf})
        self.sender = HeldSender()
        self.computing = HeldCompute()
        self.model = FakeModel()
        self.prefill: ChunkedPrefill[TransferJob] = ChunkedPrefill(
            self.model,  # type: ignore[arg-type]
            PagedKVPool(LAYOUT, num_pages=8, page_size=4, device=torch.device("cpu")),
            chunk_size=6,
        )
        self.lifecycle = Lifecycle(drain_timeout=30.0)
        self.left = False
        self.shell = SimpleNamespace(
            control=self.control,
            metrics=Metrics(),
            inbox=queue.SimpleQueue(),
            lifecycle=self.lifecycle,
            leave=lambda: setattr(self, "left", True),
        )
        self.engine = self.new_engine(
            EngineParts(
                prefill=self.prefill,
                device=torch.device("cpu"),
                resources=SendResources(reading=None, rings=None, connect=None, silence=None),  # type: ignore[arg-type]
                fetching=FetchResources(connect=None, silence=None, new_sink=None, page_size=4),  # type: ignore[arg-type]
                offer=Offer(IDENTITY, ("tcp",), max_tokens=32, vocab_size=100),
                metrics=self.shell.metrics,
                wake=lambda: None,
                transfer_timeout=30.0,
            )
        )
        self.engine._compute = self.computing  # type: ignore[assignment]
        self.engine._sender = self.sender  # type: ignore[assignment]
        self.start_step = self.engine._start_step
        self.engine._start_step = lambda: None  # type: ignore[method-assign]
        self.endpoint = PrefillEndpoint(self.shell, self.engine)  # type: ignore[arg-type]

    def new_engine(self, parts: EngineParts) -> ModelEngine:
        return ModelEngine(parts)

    def tell(self) -> None:
        """Let the endpoint say what has happened."""
        for update in self.engine.poll():
            self.endpoint._send_update(update)

    def receive(self, message: Message, sender: Peer | None = None) -> None:
        self.endpoint._take(sender or DECODE, message)
        self.tell()

    def start(self) -> None:
        """Let the engine start its next step."""
        self.start_step()

    def finish(self, error: str | None = None) -> None:
        """The step that was started ends."""
        step, self.computing.step = self.computing.step, None
        assert step is not None
        queued = {} if error else self.prefill.compute(step)
        logprobs = {job: found.wait() for job, found in queued.items()}
        self.engine._report(Computed(step, error, prompt_logprobs=logprobs))
        self.tell()

    def compute(self) -> None:
        self.start()
        self.finish()

    def sent(
        self,
        error: str | None = None,
        lingering: bool = False,
        posted_at: float = 0.0,
        ended_at: float = 0.0,
        waited: float = 0.0,
        checksums: bool = False,
        in_flight: bool = False,
    ) -> None:
        """The writes of the oldest chunk ended. With `checksums`, one of all its positions was noted."""
        chunk = self.sender.chunks.pop(0)
        noted = [checksum_of(chunk.start, chunk.stop)] if checksums else []
        sent = SendReport(chunk, 10, 1, posted_at, ended_at, waited, noted, error, lingering, in_flight)
        self.engine._report(sent)
        self.tell()

    def housekeep(self, now: float) -> None:
        self.endpoint._housekeep(now)
        self.engine._stop_late_transfers(now)
        self.tell()

    def script(self, *turns: Callable[[], object]) -> list[Callable[[], object]]:
        """What happens in the turns of `endpoint.run`, one after another; the list is empty when all of it has."""
        self.engine._start_step = self.start_step  # type: ignore[method-assign]
        left = list(turns)

        def receive(_: float) -> list[object]:
            if left:
                left.pop(0)()
            return []

        self.shell.receive = receive
        return left

    @property
    def free_pages(self) -> int:
        return self.prefill.pool.free_pages


def request(**changes: Any) -> PrefillRequest:
    fields: dict[str, Any] = {
        "attempt": R,
        "token_ids": tuple(range(10)),
        "destination": Destination(identity=IDENTITY, buffers=BUFFERS, sessions=TCP),
        "extents": ((0, 10),),
        "hisparse": True,
    }
    return PrefillRequest(**{**fields, **changes})


def test_done_is_said_after_the_last_write_and_repeated_until_admitted() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent()
    assert not h.control.repeated
    h.sent()
    [(peer, done)] = h.control.repeated.values()
    assert peer == DECODE
    assert isinstance(done, PrefillDone)
    assert (done.num_tokens, done.transferred_bytes) == (10, 20)
    assert h.free_pages == 5, "pages are kept until the decode node has admitted the request"
    h.receive(Admitted(attempt=R))
    assert not h.control.repeated
    assert h.free_pages == 8


def test_a_repeated_request_is_answered_and_computed_once() -> None:
    h = Harness()
    h.receive(request())
    h.receive(request())
    assert len(h.control.take(PrefillAccepted)) == 2
    assert h.engine.queued_tokens == 10


def test_quiesced_is_said_only_when_no_write_is_in_flight() -> None:
    """sglang PRs 24580, 31357: a late write after an abort corrupted another request."""
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.receive(Abort(attempt=R))
    assert all(chunk.cancelled() for chunk in h.sender.chunks)
    assert h.control.take(Quiesced) == []
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == []
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]
    assert h.free_pages == 8


def test_an_abort_is_answered_again_and_a_late_repeat_of_its_request_is_not_started() -> None:
    h = Harness()
    for _ in range(2):
        h.receive(Abort(attempt=R))
    assert len(h.control.take(Quiesced)) == 2
    h.receive(request())
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]
    assert h.engine.queued_tokens == 0


def test_the_next_epoch_is_another_request() -> None:
    h = Harness()
    h.receive(Abort(attempt=R))
    h.receive(request(attempt=R._replace(epoch=2)))
    assert h.engine.queued_tokens == 10


def test_a_request_that_moved_to_another_decode_node_is_another_one() -> None:
    """Its first decode node fell silent, and a write to that one takes a minute to fail: the second must not wait."""
    h = Harness()
    second = Peer(role="decode", address="127.0.0.1:2", boot_id="second")
    h.receive(request())
    h.compute()
    theirs = R._replace(decode="second")
    h.receive(request(attempt=theirs), second)
    assert len(h.engine.attempts) == 2
    h.receive(Abort(attempt=theirs), second)
    assert h.control.sent[-1] == (second, Quiesced(attempt=theirs))
    assert not h.sender.chunks[0].cancelled(), "the first one's own affair"
    h.receive(Holding(attempts=(theirs,)), second)
    assert h.control.sent[-1] == (second, NotHeld(attempts=(theirs,)))
    h.receive(Holding(attempts=(R,)))
    assert h.control.sent[-1] == (DECODE, Progress(computed=((R, 6),)))


def test_a_node_that_drains_hands_back_what_it_has_not_begun_and_finishes_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_FAREWELL_S", 0.0)
    h = Harness()
    h.receive(request())
    h.receive(request(attempt=R._replace(request_id="waits")))
    h.compute()
    done: list[type[Message]] = []
    turns = h.script(
        lambda: h.receive(request(attempt=R._replace(request_id="late"))),
        h.finish,
        h.sent,
        h.sent,
        lambda: done.extend(type(message) for _, message in h.control.repeated.values()),
        lambda: h.receive(Admitted(attempt=R)),
    )
    h.lifecycle.drain()
    h.endpoint.run()
    assert h.left
    assert not turns, "it ended before it had nothing left"
    assert done == [PrefillDone]
    handed_back = h.control.take(PrefillFailed)
    assert [(failed.attempt.request_id, failed.leaving, failed.in_flight) for failed in handed_back] == [
        ("waits", True, False),
        ("late", True, False),
    ]
    assert len(h.engine.attempts) == 0
    assert h.free_pages == 8


def test_a_node_that_ends_hands_everything_back_as_soon_as_its_writes_have_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_FAREWELL_S", 0.0)
    h = Harness()
    h.receive(request())
    h.compute()
    turns = h.script(lambda: h.receive(request(attempt=R._replace(request_id="late"))), lambda: h.sent(error="aborted"))
    h.lifecycle.end()
    h.endpoint.run()
    assert not turns
    assert len(h.engine.attempts) == 0
    assert [(failed.attempt.request_id, failed.leaving) for failed in h.control.take(PrefillFailed)] == [
        ("late", True),
        ("r", True),
    ]
    assert h.free_pages == 8


@pytest.mark.parametrize("stop", [Lifecycle.drain, Lifecycle.end])
def test_a_node_with_nothing_to_do_refuses_for_a_while_before_it_leaves(
    stop: Callable[[Lifecycle], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode node that asked a process which is gone would keep its slots in quarantine. SIGINT is no exception."""
    monkeypatch.setattr(endpoint, "_FAREWELL_S", 0.2)
    h = Harness()
    turns = h.script(lambda: None, lambda: h.receive(request()))
    stop(h.lifecycle)
    h.endpoint.run()
    assert not turns
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert failed.leaving


def test_what_has_not_ended_by_the_drain_timeout_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FAREWELL_S", 0.0)
    h = Harness()
    h.receive(request())
    h.compute()
    turns = h.script(h.sent, h.lifecycle.end, h.finish, lambda: h.sent(error="aborted"))
    h.lifecycle.drain()
    h.endpoint.run()
    assert not turns
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert (failed.reason, failed.leaving) == ("the prefill node is stopping", True)


def test_a_failed_write_ends_the_request_after_the_rest_has_drained() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent(error="the peer is gone")
    [(_, early)] = h.control.repeated.values()
    assert isinstance(early, PrefillFailed)
    assert early.in_flight, "the decode node need not wait to look elsewhere, but the slots are not quiet"
    assert h.control.take(PrefillFailed) == []
    assert h.free_pages == 5
    h.sent()
    assert not h.control.repeated
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert "the peer is gone" in failed.reason
    assert not failed.in_flight
    assert h.free_pages == 8


def test_an_abort_is_heard_while_a_chunk_computes_and_answered_when_nothing_writes_its_pages() -> None:
    h = Harness()
    h.receive(request())
    h.start()
    h.receive(Abort(attempt=R))
    assert h.sender.chunks[0].cancelled()
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == [], "the forward pass still writes to its pages"
    assert h.free_pages == 5
    h.finish()
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]
    assert h.free_pages == 8
    h.start()
    assert h.computing.step is None


def test_done_is_said_also_when_the_last_write_ends_before_the_pass_does() -> None:
    h = Harness()
    h.receive(request(token_ids=(1, 2), extents=((0, 2),)))
    h.start()
    h.sent()
    assert not h.control.repeated
    h.finish()
    [(_, done)] = h.control.repeated.values()
    assert isinstance(done, PrefillDone)


def test_a_transfer_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    h.receive(request(token_ids=(1, 2), extents=((0, 2),)))
    h.compute()
    now = time.monotonic()
    h.housekeep(now + 29)
    assert not h.control.repeated
    h.housekeep(now + 31)
    [(_, failed)] = h.control.repeated.values()
    assert isinstance(failed, PrefillFailed)
    assert failed.in_flight
    assert "transfer took longer than 30 s" in failed.reason
    h.receive(Abort(attempt=R))
    assert not h.control.repeated
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]


def test_more_decode_nodes_than_there_may_be_threads_are_refused_by_name() -> None:
    h = Harness()
    h.sender.full = True
    h.receive(request())
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert "as many decode nodes as it can" in failed.reason


def test_what_is_not_held_is_said() -> None:
    h = Harness()
    h.receive(request())
    other = AttemptId("decode", "other", 3)
    h.receive(Holding(attempts=(R, other)))
    assert h.control.take(NotHeld) == [NotHeld(attempts=(other,))]
    assert h.control.take(Progress) == [Progress(computed=((R, 0),))]


def test_a_node_says_how_far_it_is_and_which_pass_computes() -> None:
    """Of a device that hangs, the number stays as it is."""
    h = Harness()
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
    assert len(h.engine.attempts) == 1, "it is being sent"


def test_a_decode_node_is_asked_for_signs_of_life_as_soon_as_it_asks_for_a_prefill() -> None:
    """Its first layer would wait for the lease."""
    h = Harness()
    h.receive(request())
    assert h.control.watched == {DECODE}


def test_a_silent_decode_node_is_given_up_and_that_is_said_once() -> None:
    h = Harness()
    h.control.heard[DECODE.boot_id] = now = time.monotonic()
    h.receive(request())
    h.start()
    h.housekeep(now + 9)
    assert not h.sender.chunks[0].cancelled()
    with structlog.testing.capture_logs() as logs:
        for seconds in (11, 13, 15):
            h.housekeep(now + seconds)
    assert [line["event"] for line in logs] == ["decode node is silent"]
    assert h.sender.chunks[0].cancelled()


def test_nothing_is_written_to_pools_that_a_decode_process_did_not_offer_before() -> None:
    h = Harness()
    h.receive(request())
    elsewhere = Destination(
        identity=IDENTITY, buffers=BUFFERS, sessions=(Session(transport="tcp", name="another-host:1"),)
    )
    h.receive(request(attempt=R._replace(request_id="other"), destination=elsewhere))
    (failed,) = h.control.take(PrefillFailed)
    assert "offered another destination before: sessions changed" in failed.reason  # type: ignore[attr-defined]
    assert len(h.engine.attempts) == 1
    h.compute()
    assert {chunk.attempt.request_id for chunk in h.sender.chunks} == {"r"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hisparse": False}, "hisparse=false"),
        ({"token_ids": tuple(range(33)), "extents": ((0, 33),)}, "prompt of 33 tokens; this node takes up to 32"),
        ({"token_ids": (100,)}, "token id 100 is outside the vocabulary of 100"),
        (
            {
                "destination": Destination(
                    sessions=TCP,
                    identity=IDENTITY.model_copy(update={"dtype": "bfloat16"}),
                    buffers=BUFFERS,
                )
            },
            "dtype float32 != bfloat16",
        ),
        (
            {
                "destination": Destination(
                    sessions=(Session(transport="rdma", name="a:1"),), identity=IDENTITY, buffers=BUFFERS
                )
            },
            "no transport in common: tcp here, rdma at the decode node",
        ),
        (
            {
                "destination": Destination(
                    sessions=TCP,
                    identity=IDENTITY,
                    buffers=BufferInfo(ptrs=(1,), lengths=(160,), item_lengths=(16,)),
                )
            },
            "destination item lengths",
        ),
    ],
)
def test_what_this_node_cannot_do_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    """sglang PR 21591: a relaxed check could hide a real mismatch."""
    h = Harness()
    h.receive(request(**changes))
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert reason in failed.reason
    assert len(h.engine.attempts) == 0


def test_a_step_that_cannot_be_computed_costs_its_requests_and_no_others() -> None:
    h = Harness()
    h.receive(request())
    h.start()
    h.finish(error="prefill failed: out of memory")
    h.sent(error="aborted")
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert "out of memory" in failed.reason
    assert h.free_pages == 8
    h.receive(request(attempt=R._replace(epoch=2)))
    h.compute()
    h.compute()
    assert len(h.engine.attempts) == 1


def test_prompt_tokens_wait_until_they_are_computed() -> None:
    h = Harness()
    h.receive(request())
    h.receive(request(attempt=R._replace(request_id="behind"), token_ids=(1, 2, 3), extents=((0, 3),)))

    def waiting() -> float | None:
        h.engine.refresh_metrics()
        return h.shell.metrics.registry.get_sample_value("hisparse_pd_prompt_tokens_waiting")

    assert waiting() == 13
    h.compute()
    assert waiting() == 7, "a chunk of 6 is computed"
    h.compute()
    h.compute()
    assert waiting() == 0


def test_an_abort_that_comes_twice_before_the_first_is_answered_ends_nothing_else() -> None:
    """Both were in the mailbox when the node went on after a stop; the process ended."""
    h = Harness()
    h.receive(request())
    for _ in range(2):
        h.endpoint._take(DECODE, Abort(attempt=R))
    h.control.heard.clear()
    h.endpoint._housekeep(time.monotonic() + 1000)
    h.tell()
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]
    assert h.free_pages == 8
    h.receive(Abort(attempt=R))
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)], "and whoever asks later is told the same"


def test_that_a_failed_write_may_linger_is_said_whenever_it_is_said_to_be_over() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent(error="the transport gave a write up", lingering=True)
    [(_, early)] = h.control.repeated.values()
    assert isinstance(early, PrefillFailed)
    assert (early.in_flight, early.lingering) == (True, True)
    h.receive(Abort(attempt=R))
    h.sent()
    quiesced = Quiesced(attempt=R, lingering=True)
    assert h.control.take(Quiesced) == [quiesced]
    for late in (Abort(attempt=R), request(), Holding(attempts=(R,))):
        h.receive(late)
        assert h.control.take(Quiesced) == [quiesced], "the first may have been lost"
    assert all(not held.attempts for held in h.control.take(NotHeld) if isinstance(held, NotHeld))
    assert h.free_pages == 8, "the network needs no pages"


def test_an_attempt_that_failed_without_an_abort_says_that_it_may_linger() -> None:
    h = Harness()
    h.receive(request(token_ids=(1, 2), extents=((0, 2),)))
    h.compute()
    h.sent(error="the connection was lost", lingering=True)
    assert [failed.lingering for failed in h.control.take(PrefillFailed) if isinstance(failed, PrefillFailed)] == [True]


def test_an_attempt_with_a_write_of_which_nobody_knows_the_end_keeps_its_pages_and_is_never_called_quiet() -> None:
    """Not even behind a fence: Mooncake may have it queued, and send it over a connection that does not exist yet."""
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    free = h.free_pages
    h.sent(error="nobody knows whether a write has ended", in_flight=True)
    [(_, failed)] = h.control.repeated.values()
    assert isinstance(failed, PrefillFailed)
    assert failed.in_flight, "the decode node goes elsewhere at once, and keeps its slots in quarantine"
    h.sent()
    h.receive(Abort(attempt=R))
    h.receive(Holding(attempts=(R,)))
    assert not h.control.take(Quiesced)
    assert not h.control.take(NotHeld)
    assert h.free_pages == free
    assert h.engine.attempts == [R]


def test_that_something_lingers_of_a_prompt_that_landed_is_said_when_it_is_done_and_ever_after() -> None:
    """A chunk was cut and posted again: the decode node must not give the slots away before it has fenced them."""
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent(lingering=True)
    h.sent()
    [(_, done)] = h.control.repeated.values()
    assert isinstance(done, PrefillDone)
    assert done.lingering
    h.receive(Admitted(attempt=R))
    h.receive(Abort(attempt=R))
    assert h.control.take(Quiesced) == [Quiesced(attempt=R, lingering=True)]


def test_nothing_lingers_of_a_prompt_of_which_nothing_was_cut() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent()
    h.sent()
    [(_, done)] = h.control.repeated.values()
    assert isinstance(done, PrefillDone)
    assert not done.lingering


def test_transfer_seconds_are_those_in_which_something_was_being_written() -> None:
    """Chunks overlap, and wait for layers and for leave to write."""
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent(posted_at=100.0, ended_at=110.0, waited=2.0)
    h.sent(posted_at=109.0, ended_at=115.0, waited=1.0)
    [(_, done)] = h.control.repeated.values()
    assert isinstance(done, PrefillDone)
    assert done.transfer_seconds == 8.0 + 4.0


def test_a_prompt_waits_in_host_memory() -> None:
    """A copy to the device from the loop waits for the chunk that computes, and one that fails ends the node."""
    h = Harness()
    h.prefill.pool.kv = h.prefill.pool.kv.to("meta")
    h.receive(request())
    step = h.prefill.plan()
    assert step is not None
    [(job, chunk)] = step.chunks
    assert {job.token_ids.device.type, chunk.token_ids.device.type} == {"cpu"}


def test_what_landed_is_not_computed_again() -> None:
    h = Harness()
    h.receive(request(token_ids=(1, 2), extents=((0, 2),)))
    h.compute()
    h.sent()
    [job] = h.engine._jobs.values()
    for state in (JobState.COMPUTING, JobState.SENDING, JobState.SENT):
        with pytest.raises(RuntimeError, match=f"is sent and cannot become {state.value}"):
            job.move(state)
    job.move(JobState.STOPPING)
    with pytest.raises(RuntimeError, match="is stopping and cannot become sent"):
        job.move(JobState.SENT)


def test_a_node_whose_device_has_failed_hands_everything_back_and_ends() -> None:
    """It would answer fast with errors, have the shortest queue, and draw all requests."""
    h = Harness()
    failure = DeviceFailed("cuda:0 cannot be used any more: an illegal memory access was encountered")
    h.receive(request())
    h.receive(request(attempt=R._replace(request_id="waits")))
    h.start()
    step = h.computing.step
    assert step is not None

    def break_device() -> None:
        h.engine._report(Computed(step, "prefill failed: an illegal memory access", failure))

    turns = h.script(break_device, lambda: h.sent(error="aborted"))
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        h.endpoint.run()
    assert not turns
    assert h.left, "gateways hear that it takes no more"
    assert h.engine.device_failed
    assert [(failed.attempt.request_id, failed.leaving) for failed in h.control.take(PrefillFailed)] == [
        ("waits", True),
        ("r", True),
    ]
    assert h.free_pages == 8


# --- checksums, chunk by chunk ---


def chunk_done(number: int, start: int, stop: int) -> ChunkDone:
    return ChunkDone(attempt=R, number=number, checksums=Checksums.of([checksum_of(start, stop)]))


def test_the_checksums_of_a_chunk_are_told_when_it_has_landed_and_those_of_the_last_in_the_end() -> None:
    h = Harness()
    h.receive(request(token_ids=tuple(range(14)), extents=((0, 14),)))
    h.start()
    h.sent(checksums=True)
    assert list(h.control.repeated.values()) == [(DECODE, chunk_done(0, 0, 6))], "whether or not the pass has ended"
    h.receive(ChunkTaken(attempt=R, number=0))
    assert not h.control.repeated
    h.finish()
    h.compute()
    h.compute()
    h.sent(checksums=True)
    assert list(h.control.repeated.values()) == [(DECODE, chunk_done(1, 6, 12))]
    h.sent(checksums=True)
    (_, second), (_, done) = h.control.repeated.values()
    assert second == chunk_done(1, 6, 12), "it was not answered yet"
    assert isinstance(done, PrefillDone)
    assert (done.chunks, list(done.checksums.rows())) == (2, [checksum_of(12, 14)])
    h.receive(ChunkTaken(attempt=R, number=1))
    assert len(h.control.repeated) == 1
    h.receive(Admitted(attempt=R))
    assert not h.control.repeated


def test_a_chunk_that_lands_after_the_last_is_told_by_itself_too() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sender.chunks.reverse()
    h.sent(checksums=True)
    assert not h.control.repeated
    h.sent(checksums=True)
    (_, first), (_, done) = h.control.repeated.values()
    assert first == chunk_done(0, 0, 6)
    assert isinstance(done, PrefillDone)
    assert (done.chunks, list(done.checksums.rows())) == (1, [checksum_of(6, 10)])


def positions_of(*messages: Message) -> list[int]:
    """The positions whose log probabilities these messages bring."""
    told = [
        piece
        for message in messages
        if isinstance(message, ChunkDone | PrefillDone)
        for piece in message.prompt_logprobs
    ]
    return [position for piece in told for position in range(piece.start, piece.stop)]


@pytest.mark.parametrize("checksums", [True, False])
def test_log_probabilities_are_told_once_by_the_first_message_after_they_were_computed(checksums: bool) -> None:
    h = Harness()
    h.receive(request(token_ids=tuple(range(14)), extents=((0, 14),), prompt_logprobs=2, last_token_id=77))
    h.start()
    h.sent(checksums=checksums)
    assert not positions_of(*(message for _, message in h.control.repeated.values())), "they are not computed yet"
    h.finish()
    h.compute()
    h.sent(checksums=checksums)
    h.compute()
    h.sent(checksums=checksums)
    *chunks, done = (message for _, message in h.control.repeated.values())
    assert len(chunks) == (2 if checksums else 1), "only a chunk that brings something has a message"
    assert positions_of(chunks[-1]) == list(range(1, 13))
    assert positions_of(done) == [13, 14]
    assert isinstance(done, PrefillDone)
    table = PromptLogprobTable(15, 2)
    for piece in (*chunks[-1].prompt_logprobs, *done.prompt_logprobs):
        assert table.problem(piece) is None
        table.add(piece)
    assert table.complete
    assert table.floats[:, 0].tolist() == [-position for position in range(1, 15)]
    assert table.ints[:, 0].tolist() == [*range(1, 14), 77], "the last one is that of the token which is decoded"


def test_a_pass_gives_log_probabilities_to_those_that_ask_for_them() -> None:
    h = Harness()
    h.receive(request(token_ids=(1, 2, 3), extents=((0, 3),)))
    other = AttemptId("decode", "other", 1)
    h.receive(request(attempt=other, token_ids=(4, 5), extents=((0, 2),), prompt_logprobs=0, last_token_id=6))
    h.compute()
    h.sent()
    h.sent()
    dones = {key[1]: message for key, (_, message) in h.control.repeated.items()}
    assert positions_of(dones[R]) == []
    assert positions_of(dones[other]) == [1, 2]


def test_more_log_probabilities_than_a_message_should_have_are_refused() -> None:
    few = request(prompt_logprobs=20, last_token_id=5)
    offer = Offer(IDENTITY, ("tcp",), max_tokens=2**20, vocab_size=100)
    many = few.model_copy(update={"token_ids": (1,) * 2**17})
    assert offer.refusal(few) is None
    assert "exceed the limit" in str(offer.refusal(many))
    assert "token id 100" in str(offer.refusal(few.model_copy(update={"last_token_id": 100})))


def test_without_checksums_no_chunk_is_told_of() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent()
    assert not h.control.repeated
    h.sent()
    [(_, done)] = h.control.repeated.values()
    assert isinstance(done, PrefillDone)
    assert (done.chunks, len(done.checksums)) == (0, 0)


@pytest.mark.parametrize("end", ["admitted", "aborted", "failed"])
def test_an_entry_that_ends_says_nothing_of_its_chunks_any_more(end: str) -> None:
    """The decode node need not have answered: all of it was in vain, or has arrived."""
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent(checksums=True)
    assert len(h.control.repeated) == 1
    match end:
        case "admitted":
            h.sent(checksums=True)
            h.receive(Admitted(attempt=R))
        case "aborted":
            h.receive(Abort(attempt=R))
            h.sent(error="aborted")
        case "failed":
            h.sent(error="the peer is gone")
    assert len(h.engine.attempts) == 0
    assert not h.control.repeated
    h.receive(ChunkTaken(attempt=R, number=0))


def test_a_chunk_that_lands_after_an_abort_is_not_told_of() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.receive(Abort(attempt=R))
    h.sent(checksums=True)
    assert not h.control.repeated
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == [Quiesced(attempt=R)]


def test_only_its_own_decode_node_answers_for_a_chunk() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.sent(checksums=True)
    other = Peer(role="decode", address="127.0.0.1:2", boot_id="second")
    h.receive(ChunkTaken(attempt=R, number=0), other)
    h.receive(ChunkTaken(attempt=R._replace(epoch=2), number=0))
    h.receive(ChunkTaken(attempt=R, number=1))
    assert list(h.control.repeated.values()) == [(DECODE, chunk_done(0, 0, 6))]


@pytest.mark.parametrize(
    "answer",
    [
        FetchGrant(attempt=R, start=0, stop=64, extents=((0, 64),), checksums=Checksums()),
        FetchRefused(attempt=R, reason="it is not here"),
        Abort(attempt=R),
        FetchDone(attempt=R),
    ],
)
def test_a_node_asks_for_a_prefix_until_it_is_answered_or_does_not_want_it(answer: Message) -> None:
    h = Harness()
    answers: list[Message] = []
    h.engine.fetch_answered = answers.append  # type: ignore[method-assign]
    h.receive(request())
    asked = FetchRequest(attempt=R, start=0, stop=64)
    h.engine._updates.append(asked)
    h.tell()
    assert h.control.repeated["fetch", R] == (DECODE, asked)
    if isinstance(answer, FetchDone):
        h.engine._updates.append(answer)
        h.tell()
        assert h.control.take(FetchDone) == [answer]
    else:
        h.receive(answer, DECODE.model_copy(update={"boot_id": "another"}))
        assert ("fetch", R) in h.control.repeated
        h.receive(answer)
    assert ("fetch", R) not in h.control.repeated
    assert answers == ([answer] if isinstance(answer, FetchGrant | FetchRefused) else [])
