"""What clients of vLLM find in answers beyond OpenAI's API, whole and in streams."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.world import EOS, MODEL, QUESTION, VOCAB, World, chunks_of

ASK: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 100},
    "/v1/chat/completions": {"messages": [QUESTION], "max_tokens": 100},
}


def ask(service: World, path: str, stream: bool, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head and the only choice of an answer; of a stream, what its chunks have together, the last of each field."""
    answer = service.http.post(path, json={**ASK[path], "stream": stream, **fields})
    assert answer.status_code == 200, answer.text
    head: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for part in chunks_of(answer) if stream else [answer.json()]:
        head |= part
        for choice in part["choices"]:
            last |= choice
    return head, last


def says_by_token(service: World, text: str) -> None:
    service.decode.reset()
    service.decode.chunks = [[byte] for byte in text.encode()] + [[EOS]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_s_prompt_comes_as_tokens_if_asked(glm: World, stream: bool) -> None:
    glm.says("</think>hi")
    path = "/v1/chat/completions"
    head, choice = ask(glm, path, stream, return_token_ids=True, n=2)
    assert bytes(head["prompt_token_ids"]).decode() == glm.prompt
    assert "prompt_token_ids" not in choice
    assert "prompt_token_ids" not in ask(glm, path, stream)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_of_completions_has_its_prompt_as_tokens(glm: World, stream: bool) -> None:
    glm.says("hi")
    _, choice = ask(glm, "/v1/completions", stream, return_token_ids=True)
    assert choice["prompt_token_ids"] == list(b"abc")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASK)
def test_what_ended_an_answer_is_told(glm: World, path: str, stream: bool) -> None:
    says_by_token(glm, "</think>abcd")
    for fields, reason in (
        ({"stop": ["c"]}, "c"),
        ({"stop_token_ids": [ord("c")]}, ord("c")),
        ({"stop_token_ids": [EOS]}, None),
        ({}, None),
    ):
        _, choice = ask(glm, path, stream, **fields)
        assert (choice["stop_reason"], choice["finish_reason"]) == (reason, "stop"), fields


@pytest.mark.parametrize("path", ASK)
def test_a_stop_token_beyond_the_vocabulary_is_refused_by_name(glm: World, path: str) -> None:
    answer = glm.http.post(path, json={**ASK[path], "stop_token_ids": [1, VOCAB + 4]})
    error = answer.json()["error"]
    expected = f"stop_token_ids: expected token ids from 0 to {VOCAB - 1}, found {VOCAB + 4} at position 1"
    assert (answer.status_code, error["message"], error["param"]) == (400, expected, "stop_token_ids")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASK)
def test_answers_name_what_made_them(glm: World, path: str, stream: bool) -> None:
    glm.says("</think>hi")
    prints = {ask(glm, path, stream)[0]["system_fingerprint"] for _ in range(2)}
    assert len(prints) == 1
    assert prints.pop().startswith("fp_")


def test_log_probabilities_may_name_tokens_by_their_ids(glm: World) -> None:
    glm.says("</think>h")
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True}
    _, choice = ask(glm, "/v1/chat/completions", False, logprobs=True, top_logprobs=1, **fields)
    token = choice["logprobs"]["content"][-2]
    assert (token["token"], token["bytes"]) == (f"token_id:{ord('h')}", [ord("h")])
    assert token["top_logprobs"][0]["token"] == f"token_id:{ord('h')}"
    _, choice = ask(glm, "/v1/completions", False, logprobs=1, echo=True, **fields)
    assert choice["logprobs"]["tokens"][0] == f"token_id:{ord('a')}"
    assert "token_id:98" in choice["logprobs"]["top_logprobs"][1]


def test_a_model_names_its_checkpoint(glm: World) -> None:
    (card,) = glm.http.get("/v1/models").json()["data"]
    assert (Path(card["root"]) / "tokenizer.json").exists()
    assert card["parent"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_by_both_of_its_names(glm: World, stream: bool) -> None:
    glm.says("well</think>hi")
    answer = glm.chat(QUESTION, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta.model_dump() for chunk in answer]
        thoughts = [[delta.get(name) for delta in deltas] for name in ("reasoning", "reasoning_content")]
        assert thoughts[0] == thoughts[1]
        assert "".join(filter(None, thoughts[0])) == "well"
    else:
        message = answer.choices[0].message.model_dump()
        assert message["reasoning"] == message["reasoning_content"] == "well"


def test_reasoning_may_come_back_by_either_name(deepseek: World) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    for name in ("reasoning", "reasoning_content"):
        deepseek.says("hi")
        turns = [QUESTION, {"role": "assistant", name: "I look.", "tool_calls": [call]}]
        deepseek.chat(*turns, {"role": "tool", "tool_call_id": "1", "content": "sun"}, reasoning_effort="high")
        assert "I look.</think>" in deepseek.prompt


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_tokens_are_counted(glm: World, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    path = "/v1/chat/completions"
    for said, count in (("well</think>hi", 12), ("well", 5), ("</think>a</think>", 8)):
        says_by_token(glm, said)
        usage = ask(glm, path, stream, n=2, **options)[0]["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * count}, said
        says_by_token(glm, said)
        usage = ask(glm, path, stream, reasoning_effort="none", **options)[0]["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_the_most_effort_may_be_asked_for(glm: World) -> None:
    glm.says("</think>hi")
    assert glm.chat(QUESTION, extra_body={"reasoning_effort": "max"}).choices[0].message.content == "hi"
    effort: Any = "max"
    assert glm.client.responses.create(model=MODEL, input="a", reasoning={"effort": effort}).output_text == "hi"


def test_the_tokens_of_a_response_s_input_are_counted(glm: World) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
    counted = glm.client.responses.input_tokens.count(model=MODEL, input="abc", tools=tools)
    assert counted.object == "response.input_tokens"
    glm.says("</think>hi")
    glm.client.responses.create(model=MODEL, input="abc", tools=tools)
    assert counted.input_tokens == len(glm.decode.generated[-1].prompt_ids)
    with pytest.raises(openai.BadRequestError):
        glm.client.responses.input_tokens.count(model=MODEL)
