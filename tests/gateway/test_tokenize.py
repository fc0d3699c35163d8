"""/tokenize and /detokenize."""

from typing import Any

import httpx
import pytest

from tests.gateway.world import BOS, CONTEXT, MODEL, RunningGateway


def test_a_text_becomes_tokens_and_text_again(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "hi é"})
    assert answer.json() == {
        "count": 5,
        "max_model_len": CONTEXT,
        "tokens": list("hi é".encode()),
        "token_strs": None,
    }
    tokens = answer.json()["tokens"]
    assert http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json() == {"prompt": "hi é"}
    assert http.post("/detokenize", json={"tokens": [BOS, 104]}).json() == {"prompt": "<bos>h"}


def test_tokens_are_spelled_as_the_vocabulary_does(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "a b<eos>", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "Ġ", "b", "<eos>"]


def test_a_conversation_becomes_the_prompt_that_a_chat_would_get(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert bytes(tokens).decode() == "u:hi\na:"
    thinking = {"messages": messages, "chat_template_kwargs": {"thinking": True}}
    assert bytes(http.post("/tokenize", json=thinking).json()["tokens"]).decode() == "u:hi\na:<think>"


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt: expected either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "prompt: expected either prompt or messages"),
    ("/tokenize", {"prompt": 3}, "prompt: Input should be a valid string, found 3"),
    ("/tokenize", {"messages": [{"role": "user"}], "add_generation_prompt": False}, "add_generation_prompt: "),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message: "),
    ("/detokenize", {}, "tokens: Field required"),
    ("/detokenize", {"tokens": [1, 258]}, "tokens: expected token ids from 0 to 257, found 258 at position 1"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0: "),
    ("/detokenize", {"tokens": [1 << 80]}, "tokens.0: "),
]


@pytest.mark.parametrize(("path", "body", "message"), BAD)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


def test_another_model_is_not_found(http: httpx.Client, gateway: RunningGateway) -> None:
    assert http.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404
