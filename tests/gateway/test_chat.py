"""Conversations with reasoning and tools, through the official client, in the formats of both families."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.world import (
    DSML,
    GLM_TEMPLATE,
    LONG_CONTEXT,
    MODEL,
    QUESTION,
    WEATHER,
    World,
    dsml_call,
    dsml_calls,
    glm_call,
    write_checkpoint,
)


def test_an_agent_goes_on_for_five_turns(deepseek: World) -> None:
    """Two calls at once in the second; the tools' answers come back in the next prompt."""
    turns = [
        dsml_calls(dsml_call("Rome", 2)),
        "Two more." + dsml_calls(dsml_call("Paris"), dsml_call("Oslo", 3)),
        dsml_calls(dsml_call("Bern")),
        dsml_calls(dsml_call("Riga")),
        "It is warm.",
    ]
    messages: list[dict[str, Any]] = [QUESTION]
    called: list[list[tuple[str, Any]]] = []
    for turn in turns:
        deepseek.says(turn)
        choice = deepseek.chat(*messages).choices[0]
        for earlier in messages[1:]:
            assert earlier["role"] != "tool" or earlier["content"] in deepseek.prompt
        calls = choice.message.tool_calls or []
        called.append([(call.function.name, json.loads(call.function.arguments)) for call in calls])
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        messages.append(choice.message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"sun over {call.function.arguments}"}
            for call in calls
        ]
    assert called == [
        [("weather", {"city": "Rome", "days": 2})],
        [("weather", {"city": "Paris"}), ("weather", {"city": "Oslo", "days": 3})],
        [("weather", {"city": "Bern"})],
        [("weather", {"city": "Riga"})],
        [],
    ]
    assert messages[-1]["content"] == "It is warm."
    assert deepseek.prompt.count("sun over") == 5


def test_null_stands_for_what_is_not_there_and_a_refusal_is_text(deepseek: World) -> None:
    call = {"id": "a", "type": None, "function": {"name": "weather", "arguments": None}}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I may not."}], "tool_calls": [call]}
    deepseek.says("ok")
    deepseek.chat(QUESTION, refusal, {"role": "tool", "tool_call_id": "a", "content": None}, QUESTION)
    assert "I may not.\n\n" in deepseek.prompt
    assert f'{DSML}invoke name="weather">\n\n</' in deepseek.prompt
    assert "<result></result>" in deepseek.prompt


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_and_calls_come_apart(glm: World, stream: bool) -> None:
    glm.says("Rome, then.</think>I look.\n" + glm_call("Rome") + glm_call("Paris"))
    if stream:
        fields: dict[str, Any] = {"model": MODEL, "messages": [QUESTION], "tools": [WEATHER]}
        with glm.client.chat.completions.stream(**fields) as events:
            [choice] = events.get_final_completion().choices
    else:
        [choice] = glm.chat(QUESTION).choices
    message = choice.message.model_dump()
    assert message["reasoning_content"] == "Rome, then."
    assert message["content"].strip() == "I look."
    functions = [call["function"] for call in message["tool_calls"]]
    assert [function["name"] for function in functions] == ["weather", "weather"]
    assert [json.loads(function["arguments"]) for function in functions] == [{"city": "Rome"}, {"city": "Paris"}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert stream or all("index" not in call for call in message["tool_calls"])
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("switch", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_reasoning_can_be_turned_off(glm: World, switch: dict[str, Any]) -> None:
    glm.says("Sunny.")
    answer = glm.chat(QUESTION, extra_body=switch)
    assert glm.prompt.endswith("<|assistant|></think>")
    assert answer.choices[0].message.content == "Sunny."
    assert "reasoning_content" not in answer.choices[0].message.model_dump(exclude_none=True)


def test_the_template_gets_the_effort(glm: World) -> None:
    glm.says("</think>Sunny.")
    assert glm.chat(QUESTION, reasoning_effort="low").choices[0].message.content == "Sunny."
    assert glm.prompt.startswith("Reasoning Effort: low\n")
    glm.chat(QUESTION, reasoning_effort="low", extra_body={"chat_template_kwargs": {"reasoning_effort": "high"}})
    assert glm.prompt.startswith("Reasoning Effort: high\n")


def test_an_answer_that_is_cut_off_in_a_call_has_no_call(glm: World) -> None:
    text = "</think>Well. <tool_call>weather<arg_key>ci"
    glm.says(text)
    whole = glm.chat(QUESTION, max_tokens=len(text)).choices[0]
    assert whole.message.tool_calls is None
    assert whole.message.content == text.removeprefix("</think>")


def test_a_tool_that_nobody_offered_is_text(deepseek: World) -> None:
    text = dsml_calls(dsml_call("Rome")).replace("weather", "launch")
    deepseek.says(text)
    choice = deepseek.chat(QUESTION).choices[0]
    assert choice.message.tool_calls is None
    assert "launch" in choice.message.content
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("fields", [{"tools": openai.omit}, {"tool_choice": "none"}])
def test_without_tools_calls_are_text(glm: World, fields: dict[str, Any]) -> None:
    glm.says("</think>" + glm_call("Rome"))
    answer = glm.chat(QUESTION, **fields)
    assert "tools:" not in glm.prompt
    assert answer.choices[0].message.content == glm_call("Rome")
    assert answer.choices[0].finish_reason == "stop"


def test_each_answer_of_several_is_taken_apart_by_itself(glm: World) -> None:
    glm.says("yes</think>" + glm_call("Rome"))
    for choice in glm.chat(QUESTION, n=2).choices:
        assert choice.message.model_dump()["reasoning_content"] == "yes"
        assert len(choice.message.tool_calls) == 1


def test_a_file_may_replace_the_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tools | length }}")
    checkpoint = write_checkpoint(tmp_path / "checkpoint", GLM_TEMPLATE, LONG_CONTEXT)
    with World(checkpoint, chat_template=template, tool_call_parser="glm47", reasoning_parser="none") as service:
        service.says("a</think>" + glm_call("Rome"))
        message = service.chat(QUESTION).choices[0].message
        assert service.prompt == "[How is it in Rome?]1"
        assert message.content == "a</think>"
        assert len(message.tool_calls) == 1
