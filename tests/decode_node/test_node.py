"""The node's loop with its verifier: what a prefill node writes into real memory, and what of it is served."""

import math
import queue
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import structlog
import torch

from base.metrics import Metrics
from control.messages import (
    Abort,
    Accepted,
    Admitted,
    AttemptId,
    Cancel,
    Ended,
    FurtherChoice,
    Generate,
    Leaving,
    Message,
    Outputs,
    Peer,
    PrefillDone,
    PrefillRequest,
    Quiesced,
    Rejected,
    Resend,
    Sampling,
)
from decode_node.node import DecodeNode, LoopEvent
from decode_node.quarantine import on_loop
from decode_node.request import RequestState
from decode_node.verifier import Verifier
from service.lifecycle import Lifecycle
from service.shell import NodeShell
from tests.decode_node.remote_world import FIRST, SECOND, R
from tests.decode_node.world import GATEWAY, HOT, World
from tests.e2e.cluster import wait_until
from tests.prefill_node.fakes import FakeControl
from tests.transfer.world import slot_digest
from transfer.memory import Checksum, Checksums
from transfer.planner import expand_extents

NOT_BEGUN = AttemptId("decode", "not begun", 1)
GENERATE = Generate(
    request_id="r",
    prompt_ids=(*range(10), 99),
    max_new_tokens=5,
    sampling=Sampling(temperature=0),
    prefill_nodes=(FIRST, SECOND),
)


until = partial(wait_until, timeout=10)


class Shell(NodeShell[LoopEvent]):
    """A shell without ports or signals."""

    def __init__(self, control: FakeControl, metrics: Metrics) -> None:
        self.control = control  # type: ignore[assignment]
        self.metrics = metrics
        self.lifecycle = Lifecycle(drain_timeout=30.0)
        self.inbox = queue.SimpleQueue()
        self._membership = None
        self._cache_reports = None
        self._kv_events = None


def node_of(harness: World, shell: Shell) -> DecodeNode:
    """A decode node whose gateways are never lost."""
    return DecodeNode(
        shell,
        harness.scheduler,
        harness.remote,
        harness.coordinator,
        SimpleNamespace(gateway_lost=lambda *_: False),  # type: ignore[arg-type]
        harness.ranks,
    )


def test_a_flood_of_messages_takes_many_turns() -> None:
    shell = Shell(FakeControl(), Metrics())
    for _ in range(600):
        shell.inbox.put((GATEWAY, Leaving()))
    assert [len(shell.receive(0)) for _ in range(4)] == [256, 256, 88, 0]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), AssertionError()])
def test_whatever_ends_the_loop_the_gateways_are_told_to_go_elsewhere(error: Exception) -> None:
    """What raises outside of the steps' own passes costs no single request."""
    harness, shell = World(), Shell(FakeControl(), Metrics())

    def fill_rows() -> None:
        if len(harness.scheduler.requests) == 2:
            raise error

    harness.coordinator.fill_rows = fill_rows  # type: ignore[method-assign]
    for request_id in ("a", "b"):
        shell.inbox.put((GATEWAY, GENERATE.model_copy(update={"request_id": request_id})))
    with pytest.raises(type(error)):
        node_of(harness, shell).run()
    ends = {one.request_id: (one.finish_reason, one.error) for one in harness.control.outputs() if one.finish_reason}
    assert ends == dict.fromkeys(("a", "b"), ("lost", str(error) or "AssertionError()"))


class Running:
    """A decode node whose loop runs on a thread, with real tiers and a real verifier. The test plays the others."""

    def __init__(self) -> None:
        self.harness = World(verify=lambda verification: self.verifier.submit(verification))
        self.control, self.metrics = self.harness.control, self.harness.metrics
        self.shell = Shell(self.control, self.metrics)
        self.verifier = Verifier(self.harness.buffers, self.shell.inbox.put)
        self.node = node_of(self.harness, self.shell)
        self.thread = threading.Thread(target=self.node.run)
        self.thread.start()

    def stop(self) -> None:
        self.shell.lifecycle.end()
        self.thread.join(10)
        self.verifier.close()

    def ask(self, **changes: object) -> None:
        self.shell.inbox.put((GATEWAY, GENERATE.model_copy(update=changes)))

    def requested(self, epoch: int, request_id: str = "r") -> tuple[Peer, PrefillRequest]:
        """The request for a prefill under that epoch, once it is there."""
        key = ("prefill", R._replace(request_id=request_id, epoch=epoch))
        node, message = until(lambda: self.control.repeated.get(key))
        assert isinstance(message, PrefillRequest)
        return node, message

    def write(self, node: Peer, request: PrefillRequest, torn: bool = False) -> None:
        """Be the prefill node: write the prompt's KV, one item of it torn on the way, and say that it landed."""
        slots = expand_extents(request.extents)
        rows = torch.from_numpy(slots)
        host = self.harness.coordinator.host
        for tensor in (host.kv, host.index_keys):
            tensor[:, rows] = torch.arange(len(slots)).to(torch.uint8)[None, :, None]
        checksums = Checksums.of(
            [
                Checksum(buffer=buffer, start=0, stop=10, digest=slot_digest(self.harness.buffers, buffer, slots))
                for buffer in range(len(self.harness.buffers.ptrs))
            ]
        )
        if torn:
            host.kv[0, rows[3], 1] += 1
        done = PrefillDone(attempt=request.attempt, num_tokens=10, checksums=checksums)
        self.shell.inbox.put((node, done))

    def tokens(self, request_id: str = "r") -> list[int]:
        """What was streamed so far."""
        outputs = [output for output in self.control.outputs() if output.request_id == request_id]
        return [token.token_id for output in outputs for token in output.tokens]

    def finishes(self) -> dict[str, tuple[str, str | None]]:
        """How each request ended."""
        return {o.request_id: (o.finish_reason, o.error) for o in self.control.outputs() if o.finish_reason}

    def wait_until_idle(self) -> None:
        """Wait until nothing is held. The loop looks, since pools belong to its thread."""
        until(lambda: on_loop(self.shell.inbox.put, self.harness.coordinator.is_idle, timeout=10))

    def exported(self, name: str) -> float | None:
        """A metric as /metrics would show it."""
        self.node.refresh_metrics()
        return self.metrics.registry.get_sample_value(f"hisparse_pd_{name}")


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


def test_each_choice_of_a_message_is_a_request_and_answered(running: Running) -> None:
    further = tuple(FurtherChoice(request_id=name, seed=0) for name in ("s", "t", "u"))
    running.ask(group="g", further=further)
    node, request = running.requested(epoch=1)
    answers = [message for _, message in running.control.sent if isinstance(message, Accepted | Rejected)]
    assert [(type(answer), answer.request_id) for answer in answers] == [(Accepted, name) for name in "rstu"]
    running.write(node, request)
    for name in "rstu":
        until(lambda name=name: running.tokens(name) == [100, 101, 102, 103, 104])  # type: ignore[misc]


def test_torn_bytes_are_never_served_and_the_retry_on_another_node_is(running: Running) -> None:
    """vllm 44238, sglang 23020: corruption under concurrent transfers."""
    running.ask()
    node, request = running.requested(epoch=1)
    running.write(node, request, torn=True)
    other, again = running.requested(epoch=2)
    assert (node, other) == (FIRST, SECOND)
    assert not {*expand_extents(request.extents)} & {*expand_extents(again.extents)}, "the first are in quarantine"
    assert running.tokens() == []
    assert running.metrics.transfer_failures.labels("checksum")._value.get() == 1
    assert running.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    running.write(other, again)
    until(lambda: running.tokens() == [100, 101, 102, 103, 104])
    running.shell.inbox.put((FIRST, Quiesced(attempt=R)))
    running.wait_until_idle()
    assert (SECOND, Admitted(attempt=R._replace(epoch=2))) in running.control.sent
    assert (FIRST, Admitted(attempt=R)) not in running.control.sent


def test_calls_from_other_threads_are_carried_out_by_the_loop(running: Running) -> None:
    assert on_loop(running.shell.inbox.put, threading.current_thread, timeout=10) is running.thread
    assert not any(isinstance(message, Leaving) for _, message in running.control.sent)


def test_a_node_that_drains_finishes_what_streams_and_hands_over_the_rest(running: Running) -> None:
    def answers(kind: type[Message]) -> list[Message]:
        return [message for to, message in list(running.control.sent) if to == GATEWAY and isinstance(message, kind)]

    running.control.heard[FIRST.boot_id] = math.inf
    running.ask(max_new_tokens=300)
    node, request = running.requested(epoch=1)
    running.write(node, request)
    until(running.tokens)
    running.ask(request_id="not begun")
    until(lambda: ("prefill", NOT_BEGUN) in running.control.repeated)

    running.shell.lifecycle.drain()
    running.shell.inbox.put(None)
    until(lambda: "not begun" in running.finishes())
    assert running.finishes()["not begun"] == ("abort", "the decode node is stopping")
    running.ask(request_id="late")
    until(lambda: answers(Rejected))
    assert answers(Rejected) == [Rejected(request_id="late", code="draining", reason="the decode node is draining")]
    until(lambda: "r" in running.finishes())
    assert running.tokens() == list(range(100, 400))
    assert running.thread.is_alive(), "a prefill node may still be writing to its memory"
    running.shell.inbox.put((FIRST, Quiesced(attempt=NOT_BEGUN)))
    running.thread.join(10)
    assert not running.thread.is_alive()
    assert running.harness.coordinator.is_idle()


def test_a_node_that_ends_waits_for_nobody(running: Running) -> None:
    running.ask(max_new_tokens=300)
    running.requested(epoch=1)
    running.shell.lifecycle.end()
    running.thread.join(10)
    assert not running.thread.is_alive()
    [output] = running.control.outputs()
    assert (output.finish_reason, output.error) == ("abort", "the decode node is stopping")


def test_a_gateway_gets_missed_tokens_again_until_it_has_heard_of_the_end(running: Running) -> None:
    running.ask()
    running.write(*running.requested(epoch=1))
    until(lambda: ("ended", "r", GATEWAY.boot_id) in running.control.repeated)
    streamed = [token for output in running.control.outputs() for token in output.tokens]
    running.control.sent.clear()
    running.shell.inbox.put((GATEWAY, Resend(request_id="r", start=1)))
    again = until(lambda: running.control.take(Outputs))
    outputs = [output for message in again for output in message.rows()]
    assert outputs[0].start == 1
    assert list(outputs[0].tokens) == streamed[1:]
    assert outputs[-1].finish_reason is not None
    running.shell.inbox.put((GATEWAY, Ended(request_id="r")))
    until(lambda: ("ended", "r", GATEWAY.boot_id) not in running.control.repeated)


def test_leaked_slots_are_noticed_also_after_a_quarantine() -> None:
    harness = World()
    shell = Shell(harness.control, harness.metrics)
    node = node_of(harness, shell)
    shell.inbox.put((GATEWAY, GENERATE.model_copy(update={"prefill_nodes": (FIRST,)})))
    node._turn()
    leaked = harness.coordinator.host.allocate(1)
    shell.inbox.put((GATEWAY, Cancel(request_id="r")))
    node._turn()
    assert harness.remote.quarantine.num_slots == 10
    shell.inbox.put((FIRST, Quiesced(attempt=R)))
    with pytest.raises(RuntimeError, match="they leaked"):
        node._turn()
    assert leaked is not None


def test_what_a_node_owes_and_what_it_cannot_use_are_exported(running: Running) -> None:
    value = running.exported
    assert (value("kv_tokens_outstanding"), value("quarantine_seconds")) == (0, 0)
    running.ask()
    running.requested(epoch=1)
    assert value("kv_tokens_outstanding") == 15, "eleven of the prompt, and all but the last of five to come"
    running.shell.inbox.put((GATEWAY, Cancel(request_id="r")))
    until(lambda: value("quarantine_seconds"))
    assert value("kv_tokens_outstanding") == 0
    running.shell.inbox.put((FIRST, Quiesced(attempt=R)))
    until(lambda: value("quarantine_seconds") == 0)


def test_rows_and_their_hot_slots_are_exported_by_state() -> None:
    h = World(device_slots=180)
    node = node_of(h, Shell(h.control, h.metrics))

    def exported(name: str) -> dict[str, float]:
        node.refresh_metrics()
        samples = [sample for family in h.metrics.registry.collect() for sample in family.samples]
        return {"".join(s.labels.values()): s.value for s in samples if s.name == f"hisparse_pd_{name}" and s.value}

    h.ask("long", prompt=(1,) * 91, tokens=60)
    while not exported("rows"):
        h.turn()
    whole = 90 + 64
    assert (exported("rows"), exported("hot_slots")) == ({"filling": 1}, {"filling": whole, "buffered": HOT + 1})
    while "filling" in exported("rows"):
        h.turn()
    assert (exported("rows"), exported("hot_slots")) == ({"resident": 1}, {"resident": whole})
    assert (exported("fills_total"), exported("shrunk_rows_total")) == ({"resident": 1}, {})
    for name in range(10):
        h.ask(f"{name}", prompt=(1,) * 20)
    h.run()
    assert (exported("rows"), exported("hot_slots")) == ({}, {})
    assert (exported("fills_total"), exported("shrunk_rows_total")) == ({"resident": 1}, {"": 1})


def test_what_decoded_during_a_swap_in_violation_ends_with_an_error(running: Running) -> None:
    model = running.harness.model
    model.step_s, model.violates_at = 0.01, 20
    with structlog.testing.capture_logs() as logs:
        running.ask(max_new_tokens=300)
        running.write(*running.requested(epoch=1))
        until(lambda: "r" in running.finishes())
        assert running.finishes()["r"] == ("error", "its tokens may be wrong (swap-in violations: 1)")
        assert len(running.tokens()) < 150, "at 100 tokens a second at most: it was noticed within one"

        model.violates_at = -1
        running.ask(request_id="later", max_new_tokens=150)
        running.write(*running.requested(epoch=1, request_id="later"))
        until(lambda: "later" in running.finishes())
    assert running.finishes()["later"] == ("length", None), "a violation is held against nobody who came after it"
    assert running.tokens("later") == list(range(100, 250))
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert errors == [{"event": "swap-in violations", "violations": 1, "ended": 1, "log_level": "error"}]
    assert [running.exported("swap_in_violations_total") for _ in range(2)] == [1, 1]
    running.wait_until_idle()


def test_a_violation_ends_what_has_decoded_and_given_way_since() -> None:
    h = World(device_slots=HOT + 1 + 2)
    node = node_of(h, Shell(h.control, h.metrics))
    for name in "abcd":
        h.ask(name, prompt=(10,), tokens=30)
    h.ask("e", prompt=(10,) * 12, tokens=30)  # finds no room beside them
    h.model.violates_at = 1
    while not h.scheduler.requests.in_state(RequestState.RETRACTED):
        h.turn()
    h.model.violates_at = -1
    unhurt = [r.request_id for r in h.scheduler.requests.values() if not r.launched]
    node._housekeep(time.monotonic())
    assert list(h.scheduler.requests) == unhurt
    assert unhurt == ["e"]
    h.run()
    assert h.ended == {name: "length" if name in unhurt else "error" for name in "abcde"}
    assert all(h.answers[name] == list(range(11, 41)) for name in unhurt)
