"""What a client that asks for many answers costs the others: its prompt and settings travel once."""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from control.codec import encode
from control.messages import MAX_CHOICES, Generate
from gateway import preparer
from gateway.answers import completions
from gateway.prefix_routing import PrefixIndex
from gateway.preparer import MAX_SETTINGS_BYTES
from tests.gateway.nodes import FakeDecodeNode, wait_until
from tests.gateway.world import World

LARGE_SCHEMA = {"type": "object", "description": "x" * 600_000}


def posted(world: World, **fields: object) -> httpx.Response:
    return world.post(**{"max_tokens": 2, **fields})


def frame_bytes(decode: FakeDecodeNode) -> int:
    # A busy node's messages are repeated, byte by byte.
    return sum(map(len, {encode(message, decode.me) for message in decode.asked}))


def test_large_settings_of_many_answers_travel_once(fresh: World) -> None:
    with ThreadPoolExecutor(1) as other:
        honest = other.submit(lambda: [posted(fresh) for _ in range(20)])
        hostile = posted(fresh, n=MAX_CHOICES, structured_outputs={"json": LARGE_SCHEMA})
        assert {answer.status_code for answer in honest.result()} == {200}
    assert [choice["text"] for choice in hostile.json()["choices"]] == ["ab"] * MAX_CHOICES
    assert len({request.request_id for request in fresh.decode.generated}) == 20 + MAX_CHOICES
    assert frame_bytes(fresh.decode) < 2 * len(json.dumps(LARGE_SCHEMA))


def test_a_prompt_is_validated_and_looked_up_once_off_the_event_loop(
    fresh: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: Counter[str] = Counter()

    def counted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **fields: Any) -> Any:
            did[f"{name} {threading.current_thread().name.partition('_')[0]}"] += 1
            return work(*args, **fields)

        return call

    monkeypatch.setattr(preparer, "Generate", counted("validated", Generate))
    monkeypatch.setattr(PrefixIndex, "matched", counted("looked up", PrefixIndex.matched))
    assert posted(fresh, prompt="x" * 400, n=MAX_CHOICES).status_code == 200
    assert did.pop("validated small") == 1
    assert list(did.values()) == [1], did
    asked, *repeated = fresh.decode.asked
    assert len(asked.further) == MAX_CHOICES - 1
    assert all(message == asked for message in repeated)


def test_choices_that_a_node_refuses_go_elsewhere_together(fresh: World) -> None:
    other = fresh.start_full_decode()
    fresh.decode.reject = "queue_full"
    assert posted(fresh, n=16, prompt_logprobs=0).status_code == 200
    assert len(other.generated) == 16
    assert len(other.asked) < 4
    assert [request.prompt_logprobs is None for request in other.generated].count(False) == 1


def test_choices_that_no_node_takes_leave_nothing_behind(fresh: World) -> None:
    """Some of them end between their failure at one node and the message to the other."""
    other = fresh.start_full_decode()
    fresh.decode.reject = other.reject = "queue_full"
    assert posted(fresh, n=8).status_code == 429
    client = fresh.gateway.gateway._client
    wait_until(lambda: not (client.attempts or client._groups or client._pending or client._cancelling))
    fresh.decode.reset()
    assert posted(fresh, n=8).status_code == 200


@pytest.mark.parametrize("fresh", [{"max_body_mib": 1, "max_total_body_mib": 1}], indirect=True)
def test_a_prompt_counts_once_however_many_answers_it_has(fresh: World) -> None:
    """Two requests that would hold all bytes if each answer counted, and another client beside them."""
    fresh.decode.hold_after = 1
    body = {"prompt": [97] * 500, "max_tokens": 2, "stream": True}
    with contextlib.ExitStack() as held:
        for choices in (MAX_CHOICES, MAX_CHOICES, 8):
            stream = httpx.stream("POST", f"{fresh.gateway.url}/v1/completions", json=body | {"n": choices})
            assert held.enter_context(stream).status_code == 200


def test_settings_of_many_prompts_are_bounded(fresh: World) -> None:
    answer = posted(fresh, prompt=["a", "b"] * 32, structured_outputs={"json": LARGE_SCHEMA})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert f"all together may take {MAX_SETTINGS_BYTES}" in answer.json()["error"]["message"]
    assert fresh.decode.asked == []
    assert posted(fresh, prompt=["a", "b"], structured_outputs={"json": LARGE_SCHEMA}).status_code == 200


def test_prompts_of_token_ids_are_decoded_off_the_event_loop(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, threads = fresh.gateway.gateway._completer.tokenizer, []
    decode = tokenizer.decode

    def noted(token_ids: Sequence[int]) -> str:
        threads.append(threading.current_thread().name.partition("_")[0])
        return decode(token_ids)

    monkeypatch.setattr(tokenizer, "decode", noted)
    answer = posted(fresh, prompt=[[97, 98], [99]], echo=True)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["abab", "ccc"]
    assert threads == ["asyncio"] * 2


def test_echoes_of_many_answers_are_bounded(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_ECHO_CHARS", 400)
    assert posted(fresh, prompt="x" * 100, echo=True, n=4).status_code == 200
    answer = posted(fresh, prompt="x" * 100, echo=True, n=5)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")
    assert "500 characters of prompts; at most 400" in answer.json()["error"]["message"]
    assert len(fresh.decode.generated) == 4
