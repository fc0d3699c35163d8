"""The scheduler's policy, with real KV tiers and a model whose next token is its input plus one."""

import time
from itertools import pairwise

import pytest

from control.messages import Generate, Peer, PrefillFailed, Sampling, Token
from decode_node.request import Request, RequestState, RequestTable
from engine.runner import LaunchedStep
from engine.sampling import NoToken
from tests.decode_node.world import GATEWAY, PREFILL, VOCAB, World, counted


def test_an_answer_of_one_token_takes_one_step() -> None:
    h = World()
    h.ask("a", tokens=1)
    h.run()
    assert h.answers == {"a": [4]}
    assert h.model.batches == [1]


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    h = World()
    h.ask("a", tokens=4)
    read: list[tuple[int, int]] = []
    collect = h.runner.collect

    def noting(step: LaunchedStep) -> list[Token | NoToken]:
        read.append((step.batch.places.number, len(h.model.batches)))
        return collect(step)

    h.runner.collect = noting  # type: ignore[method-assign]
    h.run()
    assert read == [(1, 2), (2, 3), (3, 4), (4, 4)], "(step, steps that were launched by then)"


def test_a_request_that_ended_is_in_one_more_step_for_nothing() -> None:
    h = World()
    h.ask("a", prompt=(1,), tokens=100, stop_token_ids=(5,))
    h.ask("b", prompt=(1,), tokens=10)
    h.run()
    assert h.answers == {"a": [2, 3, 4, 5], "b": counted((1,), 10)}
    assert h.ended == {"a": "stop", "b": "length"}
    assert h.model.batches == [2] * 5 + [1] * 5


def test_a_lower_priority_goes_first_and_then_the_earlier_request() -> None:
    h = World(max_running=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", -1)):
        h.ask(name, tokens=2, priority=priority)
    assert list(h.scheduler.requests) == ["c", "e", "a", "b", "d"]
    h.run()
    assert list(h.ended) == ["c", "e", "a", "b", "d"]


def test_a_request_that_is_the_last_takes_no_longer_if_many_wait() -> None:
    looks = []
    generate = Generate(request_id="last", prompt_ids=(1,), max_new_tokens=1)

    class Waiting:
        @property
        def generate(self) -> Generate:
            looks.append(self)
            return generate

    table = RequestTable({str(number): Waiting() for number in range(300)})  # type: ignore[misc]
    table.add(Request(generate, GATEWAY))
    assert list(table)[-1] == "last"
    assert len(looks) == 1


def test_a_stop_token_is_not_drawn_before_the_least_number_of_tokens() -> None:
    h = World()
    h.ask("a", prompt=(1,), tokens=100, stop_token_ids=(3, 9), sampling=Sampling(temperature=0, min_tokens=4))
    h.ask("b", prompt=(1,), tokens=100, stop_token_ids=(3, 9))
    h.run()
    assert h.answers["b"] == [2, 3]
    assert h.answers["a"][0] == 2
    assert not {3, 9} & set(h.answers["a"][:4])
    assert h.answers["a"][-1] in (3, 9) or len(h.answers["a"]) == 100


def test_a_word_of_several_tokens_is_not_completed() -> None:
    h = World()
    h.ask("a", prompt=(1,), tokens=30, sampling=Sampling(temperature=0, bad_words=((4, 5), (40,))))
    h.ask("b", prompt=(4,), tokens=3, sampling=Sampling(temperature=0, bad_words=((4, 5),)))
    h.run()
    assert h.answers["a"][:3] == [2, 3, 4]
    assert (4, 5) not in list(pairwise(h.answers["a"]))
    assert 40 not in h.answers["a"]
    assert h.answers["b"][0] == 5, "words are looked for in the answer"


def test_beyond_the_bounded_queue_requests_are_rejected_and_it_reopens() -> None:
    h = World(host_slots=100, max_waiting=2)
    prompt = tuple(range(1, 61))
    assert [h.ask(name, prompt=prompt) is None for name in "abcd"] == [True, True, True, False]
    rejected = h.ask("e", prompt=prompt)
    assert rejected.code == "queue_full"  # type: ignore[attr-defined]
    assert rejected.retry_after > 0  # type: ignore[attr-defined]
    h.run()
    assert h.ask("f", prompt=prompt) is None
    h.run()
    assert set(h.answers) == {"a", "b", "c", "f"}


def test_requests_whose_prompts_take_no_slots_are_bounded_too() -> None:
    h = World(max_running=1, max_waiting=2)
    assert [h.ask(str(number), prompt=(1,), tokens=50) is None for number in range(6)] == [True] * 4 + [False] * 2
    states = [request.state for request in h.scheduler.requests.values()]
    assert states == [RequestState.LANDED] * 2 + [RequestState.WAITING] * 2
    h.run()
    assert set(h.answers) == set("0123")


def test_what_could_never_run_is_refused_with_numbers() -> None:
    h = World(host_slots=100)
    assert "exceed the context of 1000" in h.ask("a", prompt=(1,) * 990, tokens=20).reason  # type: ignore[attr-defined]
    assert "exceed the host pool of 100" in h.ask("b", prompt=(1,) * 90, tokens=20).reason  # type: ignore[attr-defined]
    assert "outside the vocabulary" in h.ask("c", prompt=(VOCAB,)).reason  # type: ignore[attr-defined]
    assert h.scheduler.requests == {}


def test_a_repeated_request_is_taken_once() -> None:
    h = World()
    h.ask("a")
    h.turn()
    h.ask("a")
    h.run()
    h.ask("a")
    assert h.scheduler.requests == {}
    assert h.answers["a"] == [4, 5, 6, 7, 8, 9]


def test_a_node_that_failed_a_request_is_not_asked_again_at_once() -> None:
    """A refusal that would pass would use up all of its attempts within milliseconds."""
    h = World(retries=5)
    other = Peer(role="prefill", address="127.0.0.1:3", boot_id="other")
    h.remote.nodes.learn(GATEWAY.address, (PREFILL, other), {})
    h.ask("a")
    h.ask("behind")
    h.scheduler.turn()
    request = h.scheduler.requests["a"]

    def fail(node: Peer) -> float:
        """For how long the request then waits for a node that has failed it."""
        failed = PrefillFailed(attempt=request.attempt("decode"), reason="not now")
        h.remote.take(node, failed)
        h.scheduler.turn()
        return request.again_at - time.monotonic()

    fail(PREFILL)
    assert request.state is RequestState.PREFILLING, "the other node at once"
    assert request.failed_nodes == {"prefill"}
    first = fail(other)
    assert request.state is RequestState.WAITING
    h.ask("later")
    h.scheduler.turn()
    assert h.state("later") is RequestState.PREFILLING, "nobody waits behind it"
    request.again_at = 0.0
    h.scheduler.turn()
    assert request.state is RequestState.PREFILLING
    assert fail(PREFILL) > first, "longer each time"


def test_without_a_prefill_node_requests_wait() -> None:
    h = World()
    h.remote.nodes.learn(GATEWAY.address, (), {})
    h.ask("a")
    h.turn()
    assert h.state("a") is RequestState.WAITING
    h.remote.nodes.learn(GATEWAY.address, (PREFILL,), {})
    h.run()
    assert h.ended == {"a": "length"}


def test_states_follow_one_another_only_as_drawn() -> None:
    request = Request(Generate(request_id="r", prompt_ids=(1,), max_new_tokens=1), GATEWAY)
    with pytest.raises(RuntimeError, match="waiting and cannot become running"):
        request.move(RequestState.RUNNING)


def test_a_prompt_that_no_node_takes_now_does_not_hold_up_shorter_ones() -> None:
    h = World()
    longer = Peer(role="prefill", address="127.0.0.1:9", boot_id="longer")
    h.remote.nodes.learn(GATEWAY.address, (PREFILL, longer), {PREFILL.boot_id: 2, "longer": 100})
    h.remote.nodes._faults_of(longer).silent_since = time.monotonic()
    h.ask("long", prompt=(1, 2, 3, 4))
    h.ask("short", prompt=(1, 2, 3))
    h.scheduler.turn()
    assert [request.request_id for request in h.scheduler.requests.in_state(RequestState.PREFILLING)] == ["short"]
