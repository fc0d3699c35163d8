"""The prefix cache in the scheduler's hands: what is found, what is sent, and that no slot is lost or wrong."""

import random
import time

import pytest
import torch

from base.block_hashes import BLOCK_TOKENS
from control.messages import AttemptId, FetchDone, FetchRequest, PrefillFailed, Quiesced
from decode_node.request import RequestState
from hisparse.swap_in import SwapInCounters
from kvcache.block_cache import PromptIds
from kvcache.extents import HostSlots
from tests.decode_node.test_node import Shell, node_of
from tests.decode_node.world import GATEWAY, HOT, PREFILL, Caching, counted, prompt
from transfer.fencing import DRAIN_GRACE_S, LANDED_CAN_WAIT_S


@pytest.mark.parametrize(
    ("shared", "start"), [(0, 0), (1, 0), (63, 0), (64, 64), (65, 64), (192, 192), (199, 192), (200, 192)]
)
def test_only_what_is_not_cached_is_asked_for(shared: int, start: int) -> None:
    """Shared are so many of 200 tokens; of these all but the last have KV."""
    h = Caching()
    first = prompt(200)
    h.serve("first", prompt=first, tokens=3)
    second = first[:shared] + prompt(200 - shared, seed=1)
    h.serve("second", prompt=second, tokens=3)
    assert h.sent("second") == [(start, 199 - start)]
    assert h.answers == {"first": counted(first, 3), "second": counted(second, 3)}
    assert (h.count("prefix_cache_queries"), h.count("prefix_cache_hits")) == (2 * 199, start)
    h.run()


@pytest.mark.parametrize("length", [65, 129])
def test_a_prompt_that_is_cached_whole_needs_no_prefill_node(length: int) -> None:
    h = Caching()
    h.serve("first", prompt=prompt(length), tokens=4)
    h.remote.nodes.learn(GATEWAY.address, (), {})
    h.serve("again", prompt=prompt(length), tokens=4)
    assert h.answers["again"] == h.answers["first"] == counted(prompt(length), 4)
    assert h.sent("again") == []
    h.run()


def test_a_conversation_finds_its_answers_too() -> None:
    h = Caching()
    text = prompt(100)
    for turn in range(4):
        h.serve(f"turn-{turn}", prompt=text, tokens=70)
        lacked = len(text) - 1 - h.sent(f"turn-{turn}")[0][0]
        assert turn == 0 or lacked < BLOCK_TOKENS + 30
        text += tuple(h.answers[f"turn-{turn}"]) + prompt(30, seed=turn)
    h.run()


def test_a_resumed_choice_keeps_the_cached_answer_that_it_uses() -> None:
    """Of a group only the prompt is cached, but what was cached of an answer before is held like the prompt."""
    h, text = Caching(host_slots=512), prompt(70)
    h.serve("whole", prompt=text, tokens=140)
    h.answers["choice"] = h.answers["whole"][:125]
    h.ask("choice", prompt=text, tokens=200, group="g", generated=tuple(h.answers["choice"]))
    for number in range(5):
        h.ask(f"other-{number}", prompt=prompt(129, seed=3 + number), tokens=2)
    h.run()
    assert h.answers["choice"] == counted(text, 200)
    assert h.sent("choice") == [(192, 2)]


def test_salts_share_nothing() -> None:
    h = Caching()
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant"), ("d", "")):
        h.serve(name, prompt=prompt(129), tokens=2, cache_salt=salt)
    assert [h.sent(name) for name in "abcd"] == [[(0, 128)], [(0, 128)], [], []]
    assert {message.cache_salt for message in h.asked} == {"", "tenant"}
    h.run()


def test_the_gateway_is_told_how_much_was_cached() -> None:
    h = Caching()
    for name in ("cold", "warm"):
        h.ask(name, prompt=prompt(150), tokens=3)
        told: list[tuple[str, int, int]] = []
        while h.scheduler.requests:
            h.land()
            h.scheduler.turn()
            told += [(o.request_id, o.start, o.cached_tokens) for o in h.control.outputs()]
            h.control.sent.clear()
        h.scheduler.outputs.ended(name, GATEWAY)
        cached = 128 if name == "warm" else 0
        assert told[0] == (name, 0, cached)
        assert told[-1] == (name, 2, cached)
    h.run()


def test_blocks_are_given_up_before_anybody_waits_or_gives_way() -> None:
    h = Caching(host_slots=640)
    for number in range(6):
        h.serve(f"before-{number}", prompt=prompt(150, seed=number), tokens=40)
    assert h.cache.blocks.blocks * BLOCK_TOKENS >= 640 - 128
    for number in range(3):
        h.ask(f"now-{number}", prompt=prompt(100, seed=100 + number), tokens=60)
    h.turn()
    assert all(h.state(f"now-{number}") is not RequestState.WAITING for number in range(3))
    h.run()
    assert h.metrics.retractions.labels("host")._value.get() == 0


def test_a_waiting_request_is_looked_up_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Caching(host_slots=400)
    h.ask("running", prompt=prompt(200), tokens=100)
    for _ in range(3):
        h.turn()
    looked_up: list[int] = []
    hold = h.cache.hold

    def noting(tokens: PromptIds, salt: str = "") -> HostSlots:
        looked_up.append(len(tokens))
        return hold(tokens, salt)

    monkeypatch.setattr(h.cache, "hold", noting)
    h.ask("waits", prompt=prompt(300, seed=1), tokens=2)
    for _ in range(20):
        h.turn()
    assert (h.state("waits"), looked_up) == (RequestState.WAITING, [299])
    h.run()
    assert h.answers["waits"] == counted(prompt(300, seed=1), 2)


def test_what_is_dropped_resumes_from_its_own_blocks() -> None:
    h = Caching(host_slots=448)
    for name in "abc":
        h.ask(name, prompt=prompt(65, seed=ord(name)), tokens=100)
    h.run()
    assert h.answers == {name: counted(prompt(65, seed=ord(name)), 100) for name in "abc"}
    assert h.metrics.retractions.labels("host")._value.get() > 0
    again = [start for name in "abc" for start, _ in h.sent(name)[1:]]
    assert max(again) >= BLOCK_TOKENS


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 80])
def test_an_aborted_request_leaves_what_was_verified(turns: int) -> None:
    h = Caching(quiet=False)
    h.serve("first", prompt=prompt(65), tokens=2)
    h.ask("aborted", prompt=prompt(150), tokens=200)
    for _ in range(turns):
        h.turn()
    h.scheduler.cancel("aborted", GATEWAY)
    h.turn()
    assert h.cache.blocks.blocks == (1 if turns < 2 else 2 if turns < 80 else 3)
    h.quiet = True
    h.run()


def test_what_is_read_stays_however_short_slots_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of the others waits that long for slots in quarantine.
    monkeypatch.setattr("decode_node.slots._FRESH_S", 0.0)
    h = Caching(host_slots=520, quiet=False, slow={"read"}, verify=lambda _: True)
    h.serve("before", prompt=prompt(130), tokens=2)
    h.ask("read", prompt=prompt(200), tokens=3)
    h.turn()
    [asked] = [message for message in h.asked if message.attempt.request_id == "read"]
    h.remote.take(PREFILL, FetchRequest(attempt=asked.attempt, start=64, stop=asked.start))
    [(_, lease)] = h.remote._attempts.leases
    lent = lease.slots.slots()
    content = h.coordinator.host.kv[0][lent].clone()
    h.scheduler.cancel("read", GATEWAY)
    for number in range(12):
        h.ask(f"other-{number}", prompt=prompt(150, seed=7 + number), tokens=40)
    while h.scheduler.requests:
        h.turn()
        assert torch.equal(h.coordinator.host.kv[0][lent], content)
    assert h.coordinator.host.used == len(lent) + 199 - 128
    h.remote.take(PREFILL, FetchDone(attempt=asked.attempt))
    assert h.coordinator.host.used == 199 - 128, "what it may write to"
    h.quiet = True
    h.run()


def test_a_lost_attempt_gives_its_prefix_back_and_the_next_one_looks_again() -> None:
    h = Caching(slow={"r"})
    h.serve("before", prompt=prompt(65), tokens=2)
    h.ask("r", prompt=prompt(200), tokens=3)
    h.turn()
    request = h.scheduler.requests["r"]
    assert request.host_slots is not None
    assert len(request.host_slots) == 64
    h.remote.take(PREFILL, PrefillFailed(attempt=request.attempt("decode"), reason="out of memory"))
    assert (request.state, request.host_slots) == (RequestState.WAITING, None)
    assert h.coordinator.host.used == 0
    h.ask("meanwhile", prompt=prompt(140), tokens=2)
    while "meanwhile" in h.scheduler.requests:
        h.turn()
    request.again_at = 0.0
    h.slow.clear()
    h.run()
    assert h.sent("r") == [(64, 135), (128, 71)]
    assert h.answers["r"] == counted(prompt(200), 3)


def test_a_late_write_of_an_abandoned_attempt_cannot_reach_what_is_shared() -> None:
    """Only slots that are not cached are named to a prefill node, and they are in quarantine."""
    h = Caching(quiet=False, slow={"r"})
    h.serve("before", prompt=prompt(129), tokens=2)
    h.ask("r", prompt=prompt(200), tokens=3)
    h.turn()
    [reservation] = h.table
    h.scheduler.cancel("r", GATEWAY)
    h.ask("other", prompt=prompt(200), tokens=40)
    h.turn()
    late = torch.from_numpy(reservation.resource.slots())
    h.coordinator.host.kv[0][late] = 255
    while "other" in h.scheduler.requests:
        h.turn()
    assert h.answers["other"] == counted(prompt(200), 40)
    h.quiet = True
    h.remote.take(PREFILL, Quiesced(attempt=AttemptId("decode", "r", 1)))
    h.run()


def test_what_may_be_written_again_is_not_cached() -> None:
    """The first copy of a batch that was cut and posted again may still land. Its slots have two owners until then."""
    h = Caching(lingering=True)
    h.ask("r", prompt=prompt(200), tokens=4)
    while h.scheduler.requests:
        h.turn()
    assert h.cache.blocks.blocks == 0
    h.remote.tick(time.monotonic() + DRAIN_GRACE_S + LANDED_CAN_WAIT_S)
    h.run()


def test_after_an_error_only_the_prompt_stays() -> None:
    h = Caching()
    h.model.overflows_after = 230
    first = (*prompt(128), 160)
    h.serve("r", prompt=first, tokens=200)
    assert h.ended == {"r": "error"}
    assert h.cache.blocks.blocks == 128 // BLOCK_TOKENS, "it had generated another block"
    h.run()


def test_after_violations_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Caching()
    h.serve("r", prompt=prompt(150), tokens=4)
    node = node_of(h, Shell(h.control, h.metrics))
    node._housekeep(1.0)
    assert h.cache.blocks.blocks > 0
    monkeypatch.setattr(h.coordinator, "counters", lambda: SwapInCounters(0, 0, 0, violations=1))
    node._housekeep(2.0)
    assert h.cache.blocks.blocks == 0
    h.run()


@pytest.mark.parametrize("seed", [1, 2, pytest.param(0, marks=pytest.mark.slow)])
def test_whatever_happens_no_slot_is_lost_and_no_kv_is_another_prompts(seed: int) -> None:
    """Conversations that share beginnings, in a pool that is too small: evictions, drops, retractions, aborts, lost
    attempts and steps that fail."""
    rng = random.Random(seed)
    h = Caching(
        host_slots=rng.choice((450, 700)), device_slots=rng.choice((HOT + 5, 30, 100)), max_running=rng.choice((2, 8))
    )
    texts: list[tuple[int, ...]] = [prompt(length, seed=length) for length in (1, 64, 65, 130, 260)]
    prompts: dict[str, tuple[int, ...]] = {}
    for number in range(200):
        if rng.random() < 0.35 and len(h.scheduler.requests) < 8:
            name = f"r{number}"
            base = rng.choice(texts)
            cut = rng.choice((len(base), len(base), rng.randrange(1, len(base) + 1)))
            prompts[name] = base[:cut] + prompt(rng.choice((0, 1, 40)), seed=number)
            h.ask(name, prompt=prompts[name], tokens=rng.choice((1, 5, 90)))
        if h.scheduler.requests and rng.random() < 0.05:
            h.scheduler.cancel(rng.choice(list(h.scheduler.requests)), GATEWAY)
        if rng.random() < 0.05:
            for request in h.scheduler.requests.in_state(RequestState.PREFILLING):
                h.remote._lose(h.remote._attempts[request.attempt("decode")], "the node went away")
                request.again_at = 0.0
        if rng.random() < 0.01:
            h.model.error = RuntimeError("too much at once")
        h.turn()
        h.model.error = None
        for ended in [name for name, reason in h.ended.items() if reason == "length" and name in prompts]:
            text = prompts.pop(ended)
            assert h.answers[ended] == counted(text, len(h.answers[ended]))
            texts.append((text + tuple(h.answers[ended]))[:400])
    h.run(5000)
    assert h.max_cached > 300
