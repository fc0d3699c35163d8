"""How requests end before their time, and that nothing of them stays behind."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from base.device import DeviceFailed
from control.messages import AttemptId, Quiesced, Sampling
from decode_node.local_prefill import LocalPrefill
from decode_node.request import RequestState
from engine.chunked import ChunkedPrefill
from kvcache.paged_pool import PagedKVPool
from tests.decode_node.world import GATEWAY, HOT, LAYOUT, PREFILL, World, counted
from transfer.fencing import DRAIN_GRACE_S, LANDED_CAN_WAIT_S


def test_a_late_write_after_an_abort_hits_nobody() -> None:
    """sglang PRs 24580, 31357: a write that arrived after the abort corrupted another request."""
    h = World(host_slots=200, quiet=False)
    h.ask("aborted", tokens=50)
    h.scheduler.turn()
    [reservation] = h.table
    h.scheduler.cancel("aborted", GATEWAY)
    h.ask("other", tokens=8)
    assert h.remote.quarantine.num_slots == 2
    h.turn()
    h.turn()
    assert h.state("other") is RequestState.RUNNING
    items = h.coordinator.host.kv[0]
    late = torch.from_numpy(reservation.resource.slots())
    before = items.clone()
    items[late] = 255
    untouched = torch.ones(len(items), dtype=torch.bool)
    untouched[late] = False
    assert torch.equal(items[untouched], before[untouched])
    while "other" in h.scheduler.requests:
        h.turn()
    assert h.answers["other"] == list(range(4, 12))
    assert h.coordinator.host.used == 2, "still fenced"
    h.remote.take(PREFILL, Quiesced(attempt=AttemptId("decode", "aborted", 1)))
    h.scheduler.check_idle()
    assert h.coordinator.is_idle()


def test_a_cut_copy_that_arrives_after_its_request_hits_nobody() -> None:
    """A batch was cut and posted again. Its first copy came when the slots had been given to the next request."""
    h = World()
    h.lingering = True
    h.ask("r", tokens=4)
    h.turn()
    h.turn()
    [reservation] = h.table
    while h.scheduler.requests:
        h.turn()
    assert h.answers["r"] == list(range(4, 8))
    host = h.coordinator.host
    others = host.allocate(host.free)
    assert others is not None
    assert host.used == host.num_slots
    written_to = set(reservation.resource.slots().tolist())
    assert not written_to & set(others.slots().tolist())
    assert len(written_to) + len(others) == host.num_slots, "what it has decoded is free"
    host.release(others)
    h.remote.tick(time.monotonic() + DRAIN_GRACE_S + LANDED_CAN_WAIT_S)
    h.scheduler.check_idle()
    assert h.coordinator.is_idle()


def test_cancelling_what_is_unknown_is_answered() -> None:
    h = World()
    h.scheduler.cancel("never heard of", GATEWAY)
    h.turn()
    assert h.ended == {"never heard of": "abort"}


def test_too_many_lost_prefills_are_an_error() -> None:
    h = World(retries=1)
    h.ask("a")
    request = h.scheduler.requests["a"]
    for _ in range(2):
        request.again_at = 0.0
        h.scheduler.turn()
        h.remote._lose(h.remote._attempts[request.attempt("decode")], "the node went away")
    h.turn()
    assert h.ended == {"a": "error"}


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    """Also where the client wants log-probabilities, and whatever way it wants its tokens picked."""
    h = World()
    h.model.overflows_after = 42
    sampling = [Sampling(temperature=0), Sampling(temperature=1, top_k=1), Sampling(temperature=0, top_logprobs=3)]
    for number, each in enumerate(sampling):
        h.ask(f"overflows-{number}", prompt=(41,), sampling=each)
    h.ask("innocent", prompt=(1, 2, 3), tokens=6)
    h.run()
    assert (h.answers.pop("innocent"), h.ended.pop("innocent")) == ([4, 5, 6, 7, 8, 9], "length")
    assert list(h.answers.values()) == [[42]] * 3, "what was sampled before is a token"
    assert list(h.ended.values()) == ["error"] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_changed_logits_that_overflow_end_their_request_alone(temperature: float) -> None:
    h = World()
    h.model.scale = 1e37
    h.ask("hostile", prompt=(2, 1), sampling=Sampling(temperature=temperature, repetition_penalty=0.01))
    honest = [Sampling(temperature=0), Sampling(seed=3), Sampling(temperature=0, frequency_penalty=1.5)]
    for number, each in enumerate(honest):
        h.ask(f"honest-{number}", prompt=(5, number), sampling=each, tokens=6)
    h.run()
    assert h.model.batches[0] == 4
    assert (h.answers.pop("hostile"), h.ended.pop("hostile")) == ([], "error")
    assert h.errors["hostile"] == "decode step failed: the logits to draw from are not finite numbers"
    assert h.answers == {f"honest-{number}": counted((5, number), 6) for number in range(3)}
    assert set(h.ended.values()) == {"length"}


def test_a_step_that_fails_ends_its_requests_and_leaks_nothing() -> None:
    h = World()
    h.ask("a", tokens=50)
    for _ in range(3):
        h.turn()
    h.model.error = RuntimeError("too much at once")
    h.turn()
    h.turn()
    assert h.ended == {"a": "error"}
    h.model.error = None
    h.ask("b")
    h.run()
    assert h.ended["b"] == "length"


def test_a_prompt_that_cannot_be_copied_to_the_host_ends_its_request_alone() -> None:
    h = World()
    h.ask("staged")
    h.ask("other")
    request = h.scheduler.requests["staged"]
    request.move(RequestState.LOCAL_PREFILL)
    request.move(RequestState.STAGING)
    failed = [(request, "an illegal address")]
    local = SimpleNamespace(
        has_work=True,
        is_idle=True,
        step=list,
        staged=lambda: ([], [failed.pop()] if failed else []),
        cancel=lambda request: False,
    )
    h.scheduler._local = h.scheduler.slots._local = local  # type: ignore[assignment]
    h.run()
    assert h.ended == {"staged": "error", "other": "length"}


def test_a_row_that_cannot_be_set_up_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request that changes logits makes tables, for which there may be no room."""

    def no_room(*_: object) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr("engine.adjustments._Tables.new", no_room)
    h = World()
    h.ask("other", tokens=8)
    h.ask("adjusts", sampling=Sampling(temperature=0, frequency_penalty=1.0))
    h.run()
    assert h.ended == {"other": "length", "adjusts": "error"}
    assert h.errors["adjusts"] == "it cannot be admitted: out of memory"
    assert h.answers == {"other": counted((3,), 8), "adjusts": []}


def computes_here(h: World, prefill: Callable[..., None] = lambda *_: None) -> None:
    """The decode node computes prompts, since no prefill node is left."""
    pool = PagedKVPool(LAYOUT, num_pages=32, page_size=4, device=h.model.device)
    model: Any = SimpleNamespace(prefill=prefill)
    h.scheduler._local = h.scheduler.slots._local = LocalPrefill(model, ChunkedPrefill(pool, 8), h.coordinator)
    h.remote.nodes.learn(GATEWAY.address, (), {})


def test_a_prompt_of_which_no_copy_can_begin_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    h = World()
    computes_here(h)
    start, errors = h.coordinator.staging.start, [MemoryError("out of memory")]

    def start_once(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        start(*arguments)

    monkeypatch.setattr(h.coordinator.staging, "start", start_once)
    h.ask("first", prompt=(1, 2, 3))
    h.turn()
    h.ask("other", prompt=(1, 2, 3))
    h.run()
    assert h.ended == {"first": "error", "other": "length"}
    assert h.errors["first"] == "prefill failed: out of memory"


def test_a_chunk_that_cannot_be_computed_here_ends_its_request_alone() -> None:
    """The others wait for their turn."""
    h, errors = World(), [MemoryError("out of memory")]

    def prefill(*_: object) -> None:
        if errors:
            raise errors.pop()

    computes_here(h, prefill)
    h.ask("large", prompt=(1,) * 30)
    h.ask("other", prompt=(1, 2, 3))
    h.run()
    assert h.ended == {"large": "error", "other": "length"}
    assert h.errors["large"] == "prefill failed: out of memory"


def test_a_lost_device_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    h = World()
    h.ask("a", tokens=50)
    h.ask("waits", tokens=50)
    for _ in range(3):
        h.turn()

    def lost(device: torch.device) -> None:
        raise DeviceFailed(f"{device} cannot be used any more: an illegal memory access was encountered")

    monkeypatch.setattr("engine.runner.check_device", lost)
    h.model.error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(DeviceFailed) as failure:
        h.turn()
    h.scheduler.end_streams(str(failure.value))
    ends = {output.request_id: output.error for output in h.control.outputs() if output.finish_reason == "lost"}
    assert ends == dict.fromkeys(("a", "waits"), str(failure.value))


@pytest.mark.parametrize("turns", range(12))
def test_whatever_a_step_in_flight_meets_no_token_is_lost_or_repeated(turns: int) -> None:
    """A cancellation, a retraction and a step that fails, at every turn of the requests' lives."""
    h = World(device_slots=HOT + 1 + 4, host_slots=200)
    for name in "abc":
        h.ask(name, prompt=(10, 11), tokens=20)
    h.ask("stops", prompt=(10,), tokens=20, stop_token_ids=(13,))
    for _ in range(turns):
        h.turn()
    h.scheduler.cancel("b", GATEWAY)
    h.turn()
    if turns % 3 == 0:
        h.model.error = RuntimeError("too much at once")
        h.turn()
        h.model.error = None
    h.run()
    for name, reason in h.ended.items():
        if reason == "length":
            assert h.answers[name] == counted((11,), 20)
    assert h.ended["b"] == "abort"
    if turns % 3:
        assert h.ended["a"] == h.ended["c"] == "length"
        assert (h.answers["stops"], h.ended["stops"]) == ([11, 12, 13], "stop")
