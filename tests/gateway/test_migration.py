"""Requests whose decode node fails after their first tokens: another node goes on."""

import json
from collections import Counter
from typing import Any

import pytest

from control.messages import FinishReason, Output, Token
from tests.gateway.nodes import FakeDecodeNode, wait_until
from tests.gateway.world import ENDPOINTS, World


def restart(world: World, **script: Any) -> FakeDecodeNode:
    """Another process at the decode node's address, which says the same."""
    world.decode.die()
    node = FakeDecodeNode(world.gateway.control_address, port=world.decode.port)
    node.chunks = world.decode.chunks
    for name, value in script.items():
        setattr(node, name, value)
    world._more.append(node)
    return node.start()


def texts(data: list[str]) -> str:
    events = [json.loads(line) for line in data if line != "[DONE]"]
    assert [event["error"] for event in events if "error" in event] == []
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_answer_goes_on_as_if_nothing_had_happened(fresh: World, path: str, stream: bool) -> None:
    def answered() -> Counter[str]:
        """Without what differs between any two answers, and in pieces of any size."""
        text = fresh.http.post(path, json={**ENDPOINTS[path], "stream": stream}).text
        volatile = {"id", "created", "created_at", "completed_at", "item_id"}
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(each) for key, each in value.items() if key not in volatile}
            return [plain(each) for each in value] if isinstance(value, list) else value

        return Counter(json.dumps(plain(json.loads(line))) for line in lines)

    fresh.decode.chunks = [[letter] for letter in b"abcdef"]
    undisturbed = answered()
    fresh.decode.hold_after = 3
    posted = fresh._background.submit(answered)
    wait_until(lambda: len(fresh.decode.generated) == 2)
    wait_until(lambda: 'requests{state="running"} 1.0' in fresh.metrics())
    other = restart(fresh)
    assert posted.result() == undisturbed
    before, [after] = fresh.decode.generated[1], other.generated
    assert (after.generated, after.sampling) == (tuple(b"abc"), before.sampling)
    assert after.request_id == f"{before.request_id}.2"
    assert "hisparse_pd_request_migrations_total 1.0" in fresh.metrics()


@pytest.mark.parametrize("reason", ["abort", "lost"])
def test_a_stream_moves_when_its_node_gives_it_up(fresh: World, reason: FinishReason) -> None:
    """At the end of a drain, or because its device fails."""
    fresh.decode.chunks = [[97], [98]]
    fresh.decode.extra_outputs = [Output(request_id="-", start=2, finish_reason=reason, error="scripted")]
    other = fresh.start_full_decode()
    other.chunks = [[letter] for letter in b"abcd"]
    with fresh.stream(max_tokens=4, logprobs=1) as data:
        assert texts(list(data)) == "abcd"
    assert [one.generated for one in other.generated] == [(97, 98)]


def test_each_choice_goes_on_with_its_own_tokens(fresh: World) -> None:
    fresh.decode.chunks = [[letter] for letter in b"abcd"]
    fresh.decode.hold_after = 2
    posted = fresh.post_later(max_tokens=4, n=3, seed=5)
    wait_until(lambda: 'requests{state="running"} 3.0' in fresh.metrics())
    first, second, third = fresh.decode.generated
    fresh.decode.send(Output(first.request_id, 2, (Token(99),)))
    finish = Output(second.request_id, 2, (Token(99), Token(100)), finish_reason="length")
    fresh.decode.send(finish)
    wait_until(lambda: second.request_id in fresh.decode.ended)
    other = restart(fresh)
    assert [choice["text"] for choice in posted.result().json()["choices"]] == ["abcd"] * 3
    went_on = [(one.request_id, one.sampling.seed, bytes(one.generated)) for one in other.generated]
    assert sorted(went_on) == [(f"{first.request_id}.2", 5, b"abc"), (f"{third.request_id}.2", 7, b"ab")]
    assert len(other.asked) == 1, "one message asks for all choices of a prompt"


def test_late_tokens_of_a_node_that_comes_back_are_dropped(fresh: World) -> None:
    """And its copy of the request is cancelled."""
    fresh.decode.chunks = [[letter] for letter in b"abcd"]
    fresh.decode.hold_after = 2
    other = fresh.start_full_decode()
    other.chunks = [[letter] for letter in b"abcd"]
    other.hold_after = 3
    with fresh.stream(max_tokens=4) as data:
        said = [next(data) for _ in range(2)]
        [mine] = fresh.decode.generated
        fresh.decode.send(Output(mine.request_id, 2, finish_reason="abort"))
        wait_until(lambda: other.generated)
        said.append(next(data))
        fresh.decode.send(Output(mine.request_id, 2, (Token(120), Token(121))))
        wait_until(lambda: mine.request_id in fresh.decode.cancelled)
        other.send(Output(other.generated[0].request_id, 3, (Token(100),), finish_reason="length"))
        assert texts([*said, *data]) == "abcd"
    assert other.cancelled == []


def test_a_request_that_kills_nodes_is_not_sent_to_a_third(fresh: World) -> None:
    fresh.decode.hold_after = 1
    with fresh.stream() as data:
        next(data)
        second = restart(fresh, hold_after=2)
        next(data)
        assert len(second.generated) == 1
        second.die()
        third = fresh.start_decode(port=second.port)
        rest = list(data)
    assert "was at 2 decode nodes when they were lost" in json.loads(rest[0])["error"]["message"]
    assert rest[1:] == ["[DONE]"]
    assert third.generated == []


def test_ranks_that_die_together_count_once(fresh: World) -> None:
    """The other rank had taken the request before it died. It was tried as there was no other node."""
    ranks = [fresh.start_decode(queued_tokens=number, rank_group="one node") for number in range(2)]
    fresh.decode.reject = "draining"
    for number, rank in enumerate(ranks, 1):
        rank.hold_after = number
    with fresh.stream(max_tokens=4) as data:
        said = []
        for rank in ranks:
            said.append(next(data))
            if rank is ranks[1]:
                fresh.decode.reject = None
            [mine] = rank.generated
            rank.send(Output(mine.request_id, len(said), finish_reason="lost"))
        assert texts([*said, *data]) == "abca"
    assert len(fresh.decode.generated) > 1, "it was asked before the other rank"


def test_a_node_that_was_dead_already_did_not_die_of_the_request(fresh: World) -> None:
    """Ranks of a node die together, and the gateway notices one first."""
    fresh.decode.hold_after = 2
    other = fresh.start_full_decode()
    with fresh.stream(max_tokens=3) as data:
        said = [next(data) for _ in range(2)]
        other.die()
        [mine] = fresh.decode.generated
        fresh.decode.send(Output(mine.request_id, 2, finish_reason="lost"))
        third = fresh.start_decode(port=other.port)
        assert texts([*said, *data]) == "abc"
    assert other.generated == []
    # The second try was at the dead node, unless the gateway was so slow that it had heard of the third by then.
    assert [one.request_id for one in third.generated] in ([f"{mine.request_id}.{number}"] for number in (3, 2))


def test_a_stream_waits_while_all_other_nodes_are_full(fresh: World) -> None:
    fresh.decode.hold_after = 2
    with fresh.stream(max_tokens=3) as data:
        said = [next(data) for _ in range(2)]
        other = restart(fresh, reject="queue_full", retry_after=0.1)
        wait_until(lambda: len(other.asked) > 1)
        other.reject = None
        other.generated.clear()
        assert texts([*said, *data]) == "abc"


@pytest.mark.parametrize("said", [0, 2])
def test_a_request_goes_back_to_a_node_that_lives_if_the_other_leaves(fresh: World, said: int) -> None:
    """The first was cut off, and has come back while the request was queued at the other one."""
    fresh.decode.hold_after = said
    other = fresh.start_full_decode()
    other.hold_after = said
    answer = fresh.post_later(max_tokens=3)
    wait_until(lambda: f'requests{{state="{"running" if said else "waiting"}"}} 1.0' in fresh.metrics())
    wait_until(lambda: fresh.decode.generated)
    fresh.decode.hold_after = None
    fresh.decode.send(Output(fresh.decode.generated[0].request_id, said, finish_reason="lost"))
    wait_until(lambda: other.generated)
    other.send(Output(other.generated[0].request_id, said, finish_reason="abort"))
    assert answer.result().json()["choices"][0]["text"] == "abc"


def test_a_stream_waits_while_no_prefill_node_is_ready(fresh: World) -> None:
    fresh.decode.hold_after = 2
    other = fresh.start_full_decode()
    with fresh.stream(max_tokens=3) as data:
        said = [next(data) for _ in range(2)]
        fresh.leaves(fresh.prefill)
        [mine] = fresh.decode.generated
        fresh.decode.send(Output(mine.request_id, 2, finish_reason="lost"))
        wait_until(lambda: mine.request_id in fresh.decode.ended)
        assert other.generated == []
        fresh.start_prefill()
        assert texts([*said, *data]) == "abc"


@pytest.mark.parametrize("fresh", [{"migration_limit": 0}], indirect=True)
def test_the_operator_may_switch_migration_off(fresh: World) -> None:
    fresh.decode.hold_after = 2
    with fresh.stream() as data:
        assert texts([next(data), next(data)]) == "ab"
        other = restart(fresh)
        rest = list(data)
    assert "the request was lost at its decode node" in json.loads(rest[0])["error"]["message"]
    assert other.generated == []
