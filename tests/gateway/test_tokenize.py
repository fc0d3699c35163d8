"""/tokenize and /detokenize."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gateway import server
from gateway.answers.streamed import encode_json
from tests.gateway.nodes import CONTEXT
from tests.gateway.world import BOS, MODEL, World


def test_a_text_becomes_tokens_and_text_again(world: World) -> None:
    answer = world.http.post("/tokenize", json={"model": MODEL, "prompt": "hi é"})
    assert answer.json() == {
        "count": 5,
        "max_model_len": CONTEXT,
        "tokens": list("hi é".encode()),
        "token_strs": None,
    }
    tokens = answer.json()["tokens"]
    assert world.http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json() == {"prompt": "hi é"}
    assert world.http.post("/detokenize", json={"tokens": [BOS, 104]}).json() == {"prompt": "<bos>h"}


def test_tokens_are_spelled_as_the_vocabulary_does(world: World) -> None:
    answer = world.http.post("/tokenize", json={"prompt": "a b<eos>", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "Ġ", "b", "<eos>"]


def test_a_conversation_becomes_the_prompt_that_a_chat_would_get(world: World) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = world.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert bytes(tokens).decode() == "u:hi\na:"
    thinking = {"messages": messages, "chat_template_kwargs": {"thinking": True}}
    assert bytes(world.http.post("/tokenize", json=thinking).json()["tokens"]).decode() == "u:hi\na:<think>"


def test_another_model_is_not_found(world: World) -> None:
    assert world.http.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404


def test_many_tokens_become_json_off_the_event_loop_and_count(
    start_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []

    def rendering(document: Any) -> bytes:
        rendered.append(threading.current_thread().name.partition("_")[0])
        return encode_json(document)

    monkeypatch.setattr(server, "encode_json", rendering)
    world = start_world(max_answer_mib=1)
    assert world.http.post("/tokenize", json={"prompt": "x" * 200_000}).json()["count"] == 200_000
    answer = world.http.post("/tokenize", json={"prompt": "x" * 200_000, "return_token_strs": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "answer_too_large")
    assert rendered == ["large", "large"]
