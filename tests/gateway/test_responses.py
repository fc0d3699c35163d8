"""/v1/responses through the official client."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.world import (
    DSML,
    MODEL,
    WEATHER,
    World,
    dsml_call,
    dsml_calls,
    events_of,
    first_of_each_run,
    glm_call,
)

TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"]}


def ask(service: World, **fields: Any) -> Any:
    fields = {"model": MODEL, "input": "How is it in Rome?", "max_output_tokens": 4096, **fields}
    return service.client.responses.create(**fields)


def post(service: World, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 64, **fields}
    return httpx.post(f"{service.gateway.url}/v1/responses", json=body, timeout=20)


def test_an_answer_is_one_message(deepseek: World) -> None:
    deepseek.says("It is warm.")
    response = ask(
        deepseek, instructions="Be short.", metadata={"a": "b"}, temperature=0.5, store=True, truncation="disabled"
    )
    assert response.output_text == "It is warm."
    assert [item.type for item in response.output] == ["message"]
    assert (response.status, response.store, response.metadata) == ("completed", False, {"a": "b"})
    assert response.id.startswith("resp_")
    assert response.instructions == "Be short."
    assert (response.temperature, response.top_p, response.truncation) == (0.5, 1.0, "disabled")
    prompt = deepseek.prompt
    assert "Be short." in prompt
    assert prompt.index("Be short.") < prompt.index("How is it in Rome?")
    assert response.usage.input_tokens == len(deepseek.decode.generated[-1].prompt_ids)
    assert response.usage.output_tokens == len("It is warm.") + 1
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert deepseek.decode.generated[-1].sampling.temperature == 0.5


def test_an_answer_has_what_open_responses_demands(glm: World) -> None:
    glm.says("so</think>yes")
    plain = post(glm).json()
    assert (plain["frequency_penalty"], plain["presence_penalty"]) == (0.0, 0.0)
    assert "encrypted_content" not in plain["output"][0]
    given = {"frequency_penalty": 0.5, "presence_penalty": -1}
    glm.says("so</think>yes")
    *_, last = events_of(post(glm, stream=True, **given))
    assert {name: last["response"][name] for name in given} == given


def test_an_agent_goes_on_with_what_it_got(deepseek: World) -> None:
    """Two calls at once; output items come back as input, as clients without stored state do."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    deepseek.says("Two." + dsml_calls(dsml_call("Paris"), dsml_call("Oslo", 3)))
    response = ask(deepseek, input=items, tools=[TOOL])
    calls = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Oslo", "days": 3}]
    assert [call.status for call in calls] == ["completed"] * 2
    assert response.output_text == "Two."
    items += [item.model_dump(exclude_none=True) for item in response.output]
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"sun over {call.arguments}"}
        for call in calls
    ]
    deepseek.says("It is warm.")
    assert ask(deepseek, input=items, tools=[TOOL]).output_text == "It is warm."
    assert deepseek.prompt.count("sun over") == 2
    assert deepseek.prompt.count(f"<{DSML}function_calls>\n") >= 1
    assert "Two." in deepseek.prompt


def test_what_stands_behind_a_call_comes_back_before_its_result(deepseek: World) -> None:
    deepseek.says("I look." + dsml_calls(dsml_call("Rome")) + "I wait.")
    response = ask(deepseek, tools=[TOOL])
    assert [item.type for item in response.output] == ["message", "function_call", "message"]
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    items += [item.model_dump(exclude_none=True) for item in response.output]
    # As models of other servers think between calls.
    items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Paris, too."}]})
    items.append({"type": "function_call", "call_id": "other", "name": "weather", "arguments": '{"city": "Paris"}'})
    for call_id in (response.output[1].call_id, "other"):
        items.append({"type": "function_call_output", "call_id": call_id, "output": f"sun of {call_id}"})
    deepseek.says("It is warm.")
    answer = ask(deepseek, input=items, tools=[TOOL], reasoning={"effort": "high"})
    assert [item.type for item in answer.output] == ["reasoning"]
    calls = dsml_calls(dsml_call("Rome"), dsml_call("Paris")).rstrip()
    assert f"Paris, too.</think>I look.\nI wait.{calls}" in deepseek.prompt
    assert deepseek.prompt.count("sun of") == 2


def test_reasoning_is_an_item_of_its_own_and_comes_back(glm: World) -> None:
    glm.says("Rome, then.</think>\nSunny.")
    response = ask(glm)
    reasoning, message = response.output
    assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == ("reasoning", [], "Rome, then.")
    assert message.content[0].text.strip() == "Sunny."
    assert response.usage.output_tokens_details.reasoning_tokens == len("Rome, then.</think>")
    glm.says("</think>yes")
    items = [{"role": "user", "content": "How?"}, *(item.model_dump(exclude_none=True) for item in response.output)]
    assert ask(glm, input=[*items, {"role": "user", "content": "Sure?"}]).output_text == "yes"
    assert "Sunny." in glm.prompt


@pytest.mark.parametrize(("effort", "end"), [("none", "</think>"), ("high", "<think>")])
def test_reasoning_effort_turns_reasoning_on_and_off(glm: World, effort: str, end: str) -> None:
    glm.says("</think>Sunny." if effort == "high" else "Sunny.")
    assert ask(glm, reasoning={"effort": effort, "summary": "auto"}).output_text == "Sunny."
    assert glm.prompt.endswith(f"<|assistant|>{end}")


def test_an_answer_that_is_cut_off_is_incomplete(glm: World) -> None:
    text = "</think>Well. <tool_call>weather<arg_key>ci"
    glm.says_until_cut_off(text)
    response = ask(glm, tools=[TOOL], max_output_tokens=len(text))
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in response.output] == ["message"]
    assert response.output[0].status == "incomplete"


def test_the_streaming_helper_puts_the_whole_response_together(glm: World) -> None:
    glm.says("Rome.</think>I look.\n" + glm_call("Rome") + glm_call("Paris"))
    with glm.client.responses.stream(
        model=MODEL, input="How?", tools=[{**TOOL, "strict": False}], max_output_tokens=4096
    ) as stream:
        seen = list(stream)
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [json.loads(item.arguments) for item in response.output if item.type == "function_call"] == [
        {"city": "Rome"},
        {"city": "Paris"},
    ]
    assert response.output_text == "I look."
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert response.usage is not None
    assert response.usage.output_tokens == sum(map(len, glm.decode.chunks or ()))


def test_events_come_in_the_published_order(glm: World) -> None:
    glm.says("a</think>b" + glm_call("Rome"))
    events = events_of(post(glm, stream=True, tools=[TOOL], max_output_tokens=999))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert first_of_each_run(kinds) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert final["output"] == done
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done[2]["arguments"] == '{"city": "Rome"}'
    assert events[0]["response"]["usage"] is None
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"] for item in done}


def test_a_stream_repeats_a_schema_with_integers_of_any_size(glm: World) -> None:
    schema = {"type": "object", "maxProperties": 10**20}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    created = post(glm, stream=True, text=text).text.split("\n\n")[0]
    assert json.loads(created.partition("data: ")[2])["response"]["text"]["format"]["schema"] == schema


def test_a_stream_that_is_cut_off_ends_incomplete(glm: World) -> None:
    text = "</think>" + glm_call("Rome")[:-20]
    glm.says_until_cut_off(text)
    *_, last = ask(glm, stream=True, tools=[TOOL], max_output_tokens=len(text))
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[-1].status == "incomplete"


def test_a_stream_that_breaks_says_so(deepseek: World) -> None:
    deepseek.breaks_after("hi there")
    *events, last = ask(deepseek, stream=True)
    assert last.type == "response.failed"
    assert last.response.error.code == "server_error"
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["hi th", "ere"]


def test_log_probabilities_come_with_the_text(deepseek: World) -> None:
    deepseek.says("abc")
    response = ask(deepseek, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = response.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == ["a", "b", "c"]
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * 3
    deepseek.says("abc")
    events = list(ask(deepseek, top_logprobs=2, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == ["a", "b", "c"]


def test_no_log_probability_of_reasoning_stands_at_the_text(glm: World) -> None:
    glm.says("a</think>bcd")
    _, message = ask(glm, top_logprobs=1).output
    assert [entry.token for entry in message.content[0].logprobs] == ["b", "c", "d"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported here"),
    ({"background": True}, "background", "not supported here"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported here"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search'"),
    ({"tools": [TOOL, TOOL]}, "", "each name once"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "pattern"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "'file_search'"),
    ({"tool_choice": "maybe"}, "tool_choice", "'maybe'"),
    ({"input": 3}, "input", "found 3"),
    ({"input": []}, "", "at least one item"),
    ({"input": [{"role": "user", "content": 3}]}, "input.0.content", "found 3"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0",
        "'input_image'",
    ),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0", "'web_search_call'"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "a whole item (none is stored)"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input.0.call_id", "required"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'tool'"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"max_output_tokens": "9"}, "max_output_tokens", "found '9'"),
    ({"max_output_tokens": 1 << 20}, "max_output_tokens", "Reduce max_output_tokens"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"top_logprobs": 21}, "top_logprobs", "20"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "found 'much'"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", "'grammar'"),
    ({"metadata": {"a": 1}}, "metadata.a", "found 1"),
    ({"truncation": "always"}, "truncation", "found 'always'"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_not_carried_out_is_named(deepseek: World, fields: dict[str, Any], param: str, message: str) -> None:
    answer = post(deepseek, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "") == param
    assert message in error["message"]


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_numbers_that_no_answer_can_repeat_are_refused(deepseek: World, number: str) -> None:
    tool = '{"type": "function", "name": "f", "parameters": {"maximum": NUMBER}}'.replace("NUMBER", number)
    body = f'{{"input": "a", "tools": [{tool}]}}'
    answer = httpx.post(f"{deepseek.gateway.url}/v1/responses", content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.0.parameters")


def test_a_prompt_that_is_too_long_keeps_its_end_if_asked(deepseek: World) -> None:
    deepseek.says("ok")
    long = "x" * (1 << 15)
    assert post(deepseek, input=long).status_code == 400
    answer = post(deepseek, input=long, truncation="auto", max_output_tokens=1)
    assert answer.status_code == 200, answer.text
    assert len(deepseek.decode.generated[-1].prompt_ids) == (1 << 15) - 1
