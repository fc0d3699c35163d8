"""/v1/messages through Anthropic's client."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from control.grammar import JsonSchema
from tests.gateway.world import (
    GLM_TEMPLATE,
    LONG_CONTEXT,
    MODEL,
    QUESTION,
    WEATHER,
    RunningGateway,
    World,
    dsml_call,
    dsml_calls,
    events_of,
    first_of_each_run,
    glm_call,
    write_checkpoint,
)

TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": WEATHER["function"]["parameters"],
}


def ask(service: World, *messages: dict[str, Any], **fields: Any) -> Any:
    fields = {"max_tokens": 4096, "messages": list(messages or (QUESTION,)), **fields}
    return service.anthropic.messages.create(model=MODEL, **fields)


def post(service: World, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 64, "messages": [QUESTION], **fields}
    return service.http.post(path, json=body, timeout=20)


def test_an_answer_is_a_message(deepseek: World) -> None:
    deepseek.says("It is warm.")
    message = ask(
        deepseek,
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 7, "context_management": {"edits": []}},
    )
    assert [(block.type, block.text) for block in message.content] == [("text", "It is warm.")]
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        *("assistant", MODEL, "end_turn"),
        None,
    )
    assert "Be short." in deepseek.prompt
    assert message.usage.input_tokens == len(deepseek.decode.generated[-1].prompt_ids)
    assert message.usage.output_tokens == len("It is warm.") + 1
    sampling = deepseek.decode.generated[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 7)


def test_text_has_no_field_that_some_clients_take_for_a_list(deepseek: World) -> None:
    deepseek.says("It is warm.")
    assert post(deepseek).json()["content"] == [{"type": "text", "text": "It is warm."}]
    [begin] = [event for event in events_of(post(deepseek, stream=True)) if event["type"] == "content_block_start"]
    assert begin["content_block"] == {"type": "text", "text": ""}


def test_claude_code_s_billing_header_is_no_part_of_the_prompt(deepseek: World) -> None:
    prompts = []
    for number in range(2):
        deepseek.says("yes")
        header = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number};"
        ask(deepseek, system=[{"type": "text", "text": header}, {"type": "text", "text": "Be short."}])
        prompts.append(deepseek.prompt)
    assert "billing" not in prompts[0]
    assert "Be short." in prompts[0]
    assert prompts[0] == prompts[1]


def test_an_agent_goes_on_with_what_it_got(deepseek: World) -> None:
    messages: list[dict[str, Any]] = [QUESTION]
    deepseek.says("Two." + dsml_calls(dsml_call("Paris"), dsml_call("Oslo", 3)))
    message = ask(deepseek, *messages, tools=[TOOL])
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    uses = message.content[1:]
    assert [use.input for use in uses] == [{"city": "Paris"}, {"city": "Oslo", "days": 3}]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": f"sun over {use.input}"}]}
        for use in uses
    ]
    messages.append(
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
    )
    messages.append({"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]})
    deepseek.says("It is warm.")
    message = ask(deepseek, *messages, tools=[TOOL])
    assert (message.content[0].text, message.stop_reason) == ("It is warm.", "end_turn")
    prompt = deepseek.prompt
    assert prompt.count("sun over") == 2
    assert (
        prompt.index("sun over {'city': 'Paris'}") < prompt.index("sun over {'city': 'Oslo'") < prompt.index("And now?")
    )


def test_the_results_in_a_turn_come_before_its_text(glm: World) -> None:
    """As they stand behind their calls in the model's own conversations. What one side says in several turns is one."""
    uses = [{"type": "tool_use", "id": each, "name": "weather", "input": {}} for each in "ab"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": f"sun {each}"} for each in "ab"]
    note = {"type": "text", "text": "And now?"}
    for turns in ([[note, *results]], [[results[0], note, results[1]]], [results, [note]], ["And now?", results]):
        glm.says("</think>Warm.")
        calls = [{"role": "assistant", "content": [use]} for use in uses]
        ask(glm, QUESTION, *calls, *({"role": "user", "content": turn} for turn in turns), tools=[TOOL])
        assert glm.prompt.endswith("</tool_call><|tool|>sun a<|tool|>sun b<|user|>And now?<|assistant|><think>")


def test_thinking_is_a_block_and_comes_back(glm: World) -> None:
    glm.says("Rome, then.</think>Sunny.")
    message = ask(glm, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "Rome, then."
    assert message.content[0].signature
    assert glm.prompt.endswith("<think>")
    turn = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
    glm.says("yes")
    answer = ask(glm, QUESTION, turn, QUESTION, thinking={"type": "disabled"})
    assert answer.content[0].text == "yes"
    assert glm.prompt.endswith("</think>")
    assert "Sunny." in glm.prompt


def test_thinking_may_be_left_out_of_the_answer(glm: World) -> None:
    glm.says("secret</think>Sunny.")
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    assert ask(glm, thinking=thinking).content[0].thinking == ""
    glm.says("secret</think>Sunny.")
    assert "secret" not in post(glm, thinking=thinking, stream=True).text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stops", [{"stop_sequences": ["zero", " three"]}, {"stop": " three", "stop_sequences": ["0"]}])
def test_a_stop_sequence_is_named(deepseek: World, stream: bool, stops: dict[str, Any]) -> None:
    deepseek.says("one two three")
    answer = ask(deepseek, stream=stream, extra_body=stops)
    if stream:
        *_, ending, _ = answer
        assert (ending.delta.stop_reason, ending.delta.stop_sequence) == ("stop_sequence", " three")
    else:
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
        assert answer.content[0].text == "one two"


def test_an_answer_that_is_cut_off_says_so(deepseek: World) -> None:
    deepseek.says_until_cut_off("It i")
    assert ask(deepseek, max_tokens=4).stop_reason == "max_tokens"


def test_the_streaming_helper_puts_the_whole_message_together(glm: World) -> None:
    glm.says("Rome.</think>I look.\n" + glm_call("Rome") + glm_call("Paris"))
    fields = {"model": MODEL, "messages": [QUESTION], "tools": [TOOL], "max_tokens": 4096}
    with glm.anthropic.messages.stream(**fields) as stream:
        texts = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert texts == "I look."
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in message.content if block.type == "tool_use"] == [
        {"city": "Rome"},
        {"city": "Paris"},
    ]
    assert message.stop_reason == "tool_use"
    assert message.content[0].signature
    assert message.usage.output_tokens == sum(map(len, glm.decode.chunks or ()))


def test_events_come_in_the_published_order(glm: World) -> None:
    glm.says("a</think>b" + glm_call("Rome"))
    events = events_of(post(glm, stream=True, tools=[TOOL], max_tokens=999))
    kinds = [event.get("delta", {}).get("type", event["type"]) for event in events]
    assert first_of_each_run(kinds) == [
        *("message_start", "content_block_start", "ping", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    assert starts[2]["content_block"]["input"] == {}


def test_a_stream_that_breaks_says_so(deepseek: World) -> None:
    deepseek.breaks_after("hi there")
    *_, last = events_of(post(deepseek, stream=True))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    deepseek.breaks_after("hi there")
    with pytest.raises(anthropic.APIStatusError):
        list(ask(deepseek, stream=True))


def test_tokens_are_counted_without_decode_nodes(start_gateway: Callable[..., RunningGateway], deepseek: World) -> None:
    deepseek.says("x")
    ask(deepseek, system="Be short.", tools=[TOOL])
    expected = len(deepseek.decode.generated[-1].prompt_ids)
    counted = deepseek.anthropic.messages.count_tokens(
        model=MODEL, messages=[QUESTION], system="Be short.", tools=[TOOL]
    )
    assert counted.input_tokens == expected
    alone = start_gateway()
    answer = httpx.post(f"{alone.url}/v1/messages/count_tokens", json={"messages": [QUESTION]})
    assert answer.json() == {"input_tokens": len("u:How is it in Rome?\na:")}
    assert httpx.post(f"{alone.url}/v1/messages", json={"messages": [QUESTION], "max_tokens": 1}).status_code == 503


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: "),
    ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer, found '5'"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages.0.content.0: expected a block of type text, thinking, tool_use or tool_result, found one of type",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages.0.content.0.content.0: expected a block of type text or search_result, found one of type 'image'",
    ),
    ({"system": [{"type": "image"}]}, "system.0.type: "),
    ({"parallel_tool_calls": False}, "parallel_tool_calls: not supported here other than True, found False"),
    ({"add_special_tokens": True}, "add_special_tokens: not supported here other than False, found True"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: "),
    ({"tools": [{"name": "x"}]}, "tools.0.input_schema: "),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice: expected a choice of type auto, any, tool or none"),
    ({"thinking": {"type": "much"}}, "thinking.type: "),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: not supported here"),
    ({"stop_sequences": "x"}, "stop_sequences: "),
    ({"temperature": 3}, "temperature: "),
    ({"max_tokens": 1 << 20}, "input length and `max_tokens` exceed context limit: "),
    ({"system": "x" * (1 << 15)}, "prompt is too long: "),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_not_carried_out_is_named(deepseek: World, fields: dict[str, Any], message: str) -> None:
    answer = post(deepseek, **fields)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    "wrap", [lambda form: {"output_config": {"format": form}}, lambda form: {"output_format": form}]
)
def test_the_answer_follows_a_schema_by_either_name(deepseek: World, wrap: Callable[[object], dict[str, Any]]) -> None:
    deepseek.says('{"a": 1}')
    assert post(deepseek, **wrap({"type": "json_schema", "schema": {"type": "object"}})).status_code == 200
    grammar = deepseek.decode.generated[0].grammar
    assert grammar is not None
    assert grammar.structure == JsonSchema(schema_text='{"type": "object"}')


def test_the_tool_runner_sends_the_whole_conversation_each_time(deepseek: World) -> None:
    """It leaves earlier turns to threads, unless the service has none."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        deepseek.says("Warm.")
        return f"sun over {city}"

    deepseek.says(dsml_calls(dsml_call("Rome")))
    runner = deepseek.anthropic.beta.messages.tool_runner(
        model=MODEL, max_tokens=4096, messages=[QUESTION], tools=[weather]
    )
    assert [block.text for block in runner.until_done().content if block.type == "text"] == ["Warm."]
    assert deepseek.prompt.index(QUESTION["content"]) < deepseek.prompt.index("sun over Rome")
    answer = post(deepseek, thread={"type": "continue", "previous_message_id": "msg_1"})
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert answer.status_code == 400


def test_tool_choice_none_and_auto_are_carried_out(glm: World) -> None:
    glm.says("</think>" + glm_call("Rome"))
    message = ask(glm, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]
    glm.says("</think>" + glm_call("Rome"))
    message = ask(glm, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": False})
    assert [block.type for block in message.content] == ["tool_use"]


def test_errors_have_anthropic_s_form_on_its_paths_alone(start_gateway: Callable[..., RunningGateway]) -> None:
    gateway = start_gateway(api_keys=("sk-one",), max_body_mib=1)
    key = {"x-api-key": "sk-one"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = httpx.post(f"{gateway.url}{path}", json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        answer = httpx.post(f"{gateway.url}{path}", content=b" " * ((1 << 20) + 1), headers=key)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
        answer = httpx.get(f"{gateway.url}{path}", headers=key)
        assert (answer.status_code, answer.json()["type"]) == (405, "error")
    assert httpx.post(f"{gateway.url}/v1/responses", json={}).json()["error"]["code"] == "invalid_api_key"
    missing = {"model": "other", "messages": [QUESTION], "max_tokens": 1}
    answer = httpx.post(f"{gateway.url}/v1/messages", json=missing, headers=key)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("fresh", [{"max_concurrent_requests": 1}], indirect=True)
def test_a_busy_gateway_says_so_in_anthropic_s_form(fresh: World) -> None:
    fresh.decode.hold_after = 2
    with fresh.http.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}) as held:
        lines = held.iter_lines()
        next(lines)
        answer = fresh.http.post("/v1/messages", json={"messages": [QUESTION], "max_tokens": 1})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_both_headers_may_carry_the_key(start_gateway: Callable[..., RunningGateway]) -> None:
    gateway = start_gateway(api_keys=("sk-one",))
    url = f"{gateway.url}/v1/messages/count_tokens"
    body = {"messages": [QUESTION]}
    for headers, status in (
        ({"x-api-key": "sk-one"}, 200),
        ({"Authorization": "Bearer sk-one"}, 200),
        ({"Authorization": "Bearer other", "x-api-key": "sk-one"}, 200),
        ({"x-api-key": "Bearer sk-one"}, 401),
        ({"x-api-key": "sk-two"}, 401),
        ({"x-api-key": ""}, 401),
    ):
        assert httpx.post(url, json=body, headers=headers).status_code == status, headers
    with anthropic.Anthropic(base_url=gateway.url, api_key="sk-one", max_retries=0) as client:
        assert client.messages.count_tokens(model=MODEL, messages=[QUESTION]).input_tokens
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="sk-two").messages.count_tokens(model=MODEL, messages=[QUESTION])


def test_reasoning_that_is_not_wanted_is_left_out_where_a_model_cannot_but_reason(tmp_path: Path) -> None:
    """As GLM-5.3."""
    off = "{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>{% endif %}"
    assert off in GLM_TEMPLATE
    always = GLM_TEMPLATE.replace(off, "{% set end = '</think>' %}<think>")
    checkpoint = write_checkpoint(tmp_path, always, LONG_CONTEXT, "glm_moe_dsa")
    disabled: dict[str, Any] = {"thinking": {"type": "disabled"}, "tools": [TOOL]}
    with World(checkpoint) as world:
        world.says(f"Rome, then.</think>I look.\n{glm_call('Rome')}")
        message = ask(world, **disabled)
        assert [block.type for block in message.content] == ["text", "tool_use"]
        with world.anthropic.messages.stream(model=MODEL, max_tokens=64, messages=[QUESTION], **disabled) as stream:
            indexes = [event.index for event in stream if event.type == "content_block_start"]
            streamed = stream.get_final_message()
        assert indexes == [0, 1]
        assert [block.type for block in streamed.content] == ["text", "tool_use"]
        assert (streamed.content[0].text, streamed.content[1].input) == ("I look.", {"city": "Rome"})
        assert world.prompt.endswith("<think>")
        assert streamed.usage.output_tokens > len("Rome, then.")
        assert post(world, "/v1/messages/count_tokens", **disabled).status_code == 200
        assert post(world, chat_template_kwargs={"enable_thinking": False}).status_code == 400
        body = {"model": MODEL, "messages": [QUESTION], "reasoning_effort": "none"}
        assert world.http.post("/v1/chat/completions", json=body).status_code == 400
        world.says("Only thoughts")
        assert ask(world, **disabled).content == []
