"""What a request says of its tool calls is carried out alike at all endpoints that have them, and in all formats."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from control.grammar import Lark
from tests.gateway.formats.test_call_grammar import accepts
from tests.gateway.world import (
    CHAT_TEMPLATE,
    LONG_CONTEXT,
    QUESTION,
    WEATHER,
    World,
    dsml_call,
    dsml_calls,
    glm_call,
    write_checkpoint,
)

FUNCTION = WEATHER["function"]
PARAMETERS = {"input_schema": FUNCTION["parameters"]}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
ONE = dsml_calls(dsml_call("Rome"))
TWO = dsml_calls(dsml_call("Rome"), dsml_call("Oslo"))
NAMED = {"type": "function", "function": {"name": "weather"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A model whose template knows no tools."""
    with World(write_checkpoint(tmp_path_factory.mktemp("plain"), CHAT_TEMPLATE, LONG_CONTEXT)) as service:
        yield service


def ask(service: World, path: str, choice: str = "auto", parallel: bool = True, strict: bool = False) -> httpx.Response:
    """Ask with one tool. choice: auto, required, or the tool's name."""
    named = choice == "weather"
    strictly = {"strict": strict}
    body: dict[str, Any] = {"messages": [QUESTION], "max_tokens": 4096}
    if path == "/v1/messages":
        kinds = {"auto": {"type": "auto"}, "required": {"type": "any"}, "weather": {"type": "tool", "name": "weather"}}
        body["tools"] = [{"name": "weather", **strictly, **PARAMETERS}]
        body["tool_choice"] = {**kinds[choice], "disable_parallel_tool_use": not parallel}
    elif path == "/v1/responses":
        body = {"input": QUESTION["content"], "parallel_tool_calls": parallel, "tools": [{**FUNCTION, **strictly}]}
        body["tools"][0]["type"] = "function"
        body["tool_choice"] = {"type": "function", "name": "weather"} if named else choice
    else:
        body |= {"tools": [{**WEATHER, "function": FUNCTION | strictly}], "parallel_tool_calls": parallel}
        body["tool_choice"] = NAMED if named else choice
    return service.http.post(path, json=body)


def grammar(service: World) -> str:
    """That of the last request."""
    found = service.decode.generated[-1].grammar
    assert found is not None
    assert isinstance(found.structure, Lark)
    return found.structure.grammar


@pytest.mark.parametrize("path", PATHS)
def test_a_named_function_is_called_once(deepseek: World, path: str) -> None:
    deepseek.says(ONE)
    assert ask(deepseek, path, "weather").status_code == 200
    assert [accepts(grammar(deepseek), text) for text in (ONE, TWO, "Hello.")] == [True, False, False]


@pytest.mark.parametrize("path", PATHS)
def test_without_parallel_calls_an_answer_has_one_at_most(deepseek: World, path: str) -> None:
    deepseek.says("Hello.")
    assert ask(deepseek, path, parallel=False).status_code == 200
    assert [accepts(grammar(deepseek), f"Hello.{text}") for text in ("", ONE, TWO)] == [True, True, False]


@pytest.mark.parametrize("path", PATHS)
def test_a_strict_tool_s_schema_is_followed_though_no_call_is_required(deepseek: World, path: str) -> None:
    deepseek.says("Hello.")
    assert ask(deepseek, path, strict=True).status_code == 200
    wrong = ONE.replace("city", "town")
    assert [accepts(grammar(deepseek), f"Hello.{text}") for text in ("", TWO, wrong)] == [True, True, False]


def test_answers_without_rules_for_calls_need_no_grammar(deepseek: World) -> None:
    deepseek.says("Hello.")
    for path in PATHS:
        assert ask(deepseek, path).status_code == 200
        assert deepseek.decode.generated[-1].grammar is None


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_goes_before_a_response_format(glm: World, choice: Any) -> None:
    glm.says("</think>" + glm_call("Rome"))
    answer = glm.chat(QUESTION, tool_choice=choice, response_format=FORM)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert accepts(grammar(glm), glm_call("Rome"))


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
def test_a_call_may_stand_in_place_of_json(deepseek: World, form: str) -> None:
    deepseek.says(ONE)
    answer = deepseek.chat(QUESTION, response_format=FORM if form == "json_schema" else {"type": form})
    assert answer.choices[0].finish_reason == "tool_calls"
    texts = ('{"a": 1}', ONE, TWO, "Hello.", "[]", "I look." + ONE)
    assert [accepts(grammar(deepseek), text) for text in texts] == [True, True, True, False, False, False]


def test_no_call_stands_in_place_of_another_structure(deepseek: World) -> None:
    deepseek.says("a")
    for structure in ({"regex": "a"}, {"json": "true"}, {"json": "{"}):
        deepseek.chat(QUESTION, extra_body={"structured_outputs": structure})
        found = deepseek.decode.generated[-1].grammar
        assert found is not None
        assert not isinstance(found.structure, Lark)


@pytest.mark.parametrize("end", ["<tool_ca", "<tool_call>", "<tool_call>weather<arg_key>ci"])
@pytest.mark.parametrize("path", PATHS)
def test_a_forced_call_that_is_cut_off_is_no_text(glm: World, path: str, end: str) -> None:
    glm.says_until_cut_off("well</think>" + end)
    answer = ask(glm, path, "required").json()
    assert "<tool_ca" not in json.dumps(answer)
    assert "well" in json.dumps(answer)
    ended = (
        answer["choices"][0]["finish_reason"]
        if "choices" in answer
        else answer.get("stop_reason", answer.get("status"))
    )
    assert ended in ("length", "max_tokens", "incomplete")
    chunks = list(glm.chat(QUESTION, tool_choice="required", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


def test_the_streaming_helper_says_when_arguments_are_complete(deepseek: World) -> None:
    deepseek.decode.reset()
    deepseek.decode.chunks = [[*ONE.encode(), 257]]
    fields: dict[str, Any] = {"model": "tiny", "messages": [QUESTION], "tools": [WEATHER]}
    with deepseek.client.chat.completions.stream(**fields) as stream:
        events = list(stream)
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, json.loads(done.arguments)) == ("weather", {"city": "Rome"})


def test_the_last_chunk_of_a_chat_has_the_reason_alone(glm: World) -> None:
    glm.says("</think>" + glm_call("Rome"))
    fields: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    *chunks, last = [chunk.choices[0] for chunk in glm.chat(QUESTION, stream=True, **fields)]
    assert all(choice.finish_reason is None for choice in chunks)
    assert not any("stop_reason" in choice.model_dump() for choice in chunks)
    assert (last.delta.model_dump(exclude_none=True), last.finish_reason) == ({}, "tool_calls")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_model_without_a_format_of_calls_writes_them_as_json(plain: World, path: str, choice: str) -> None:
    call = '{"name": "weather", "parameters": {"city": "]}", "days": 2}}'
    plain.says(f"[{call}]")
    answer = ask(plain, path, choice)
    assert answer.status_code == 200
    assert json.dumps(answer.json()).count('"weather"') >= 1
    several = choice == "required"
    texts = (f"[{call}]", f"[{call}, {call}]", "Hello.", call)
    assert [accepts(grammar(plain), text) for text in texts] == [True, several, False, False]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_as_json_are_read_as_calls(plain: World, stream: bool) -> None:
    calls = ['{"name": "weather", "parameters": {"city": "]}", "days": 2}}', '{"name": "weather", "parameters": {}}']
    plain.says(f"[{', '.join(calls)}]")
    answer = plain.chat(QUESTION, tool_choice="required", stream=stream)
    if stream:
        found = {0: "", 1: ""}
        for chunk in answer:
            for call in chunk.choices[0].delta.tool_calls or ():
                found[call.index] += call.function.arguments
            assert not chunk.choices[0].delta.content
        assert chunk.choices[0].finish_reason == "tool_calls"
    else:
        found = dict(enumerate(call.function.arguments for call in answer.choices[0].message.tool_calls))
        assert answer.choices[0].message.content is None
    assert found == {0: '{"city": "]}", "days": 2}', 1: "{}"}


@pytest.mark.parametrize("path", PATHS)
def test_tools_that_no_prompt_can_tell_of_are_refused(plain: World, path: str) -> None:
    answer = ask(plain, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("tools: ")
    with pytest.raises(openai.BadRequestError):
        plain.chat(QUESTION)
    plain.says("hello")
    assert plain.chat(QUESTION, tool_choice="none").choices[0].message.content == "hello"
