# ruff: noqa: RUF001 - the format has full-width bars
"""DeepSeek-V3.2's prompts.

The first conversation is that of `encoding/test_input.json` in the deepseek-ai/DeepSeek-V3.2 checkpoint, shortened, and
its rendering follows `encoding/test_output.txt` there; the developer's turn follows `test_output_search_wo_date.txt`.
"""

import json
from typing import Any

import pytest

from gateway.formats.conversation import FormatError, Prompt
from gateway.formats.families import choose_format
from gateway.formats.tools import CallRules, ToolSet
from tests.gateway.formats.examples import calls_of, content_of, parse, reasoning_of, tool

chosen = choose_format("deepseek_v32", template=None)
assert chosen is not None
FORMAT = chosen
BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
DATETIME = tool("get_datetime", {"timezone": {"type": "string"}}, ["timezone"])
WEATHER = tool("get_weather", {"location": {"type": "string"}, "date": {"type": "string"}}, ["location", "date"])


def call(name: str, call_id: str = "call_0", **arguments: object) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result(content: str, call_id: str = "call_0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def assistant(content: str | None = None, *calls: dict[str, Any], reasoning: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return FORMAT.render(messages, tools or [], **options).text


CONVERSATION = [
    system("You are a helpful Assistant."),
    user("What's the weather tomorrow in San Francisco and New York?"),
    assistant(None, call("get_datetime", timezone="America/New_York"), reasoning="I need the current date."),
    result('{"current_date": "2024-01-15"}'),
    assistant(
        "",
        call("get_weather", "call_1", location="San Francisco", date="2024-01-16"),
        call("get_weather", "call_2", location="New York", date="2024-01-16"),
        reasoning="Tomorrow is 2024-01-16.",
    ),
    result('{"weather": "partly cloudy"}', "call_1"),
    result('{"weather": "sunny"}', "call_2"),
    assistant("Partly cloudy and sunny.", reasoning="Now I'll format a nice response."),
    user("Thanks! What about the day after tomorrow?"),
    assistant(
        None,
        call("get_weather", "call_3", location="San Francisco", date="2024-01-17"),
        reasoning="I can query directly.",
    ),
    result('{"weather": "light rain"}', "call_3"),
]
RENDERED = """<｜begin▁of▁sentence｜>You are a helpful Assistant.

## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{"name": "get_datetime", "description": "About get_datetime.", "parameters": {"type": "object", "properties": \
{"timezone": {"type": "string"}}, "required": ["timezone"]}}
{"name": "get_weather", "description": "About get_weather.", "parameters": {"type": "object", "properties": \
{"location": {"type": "string"}, "date": {"type": "string"}}, "required": ["location", "date"]}}
</functions>
<｜User｜>What's the weather tomorrow in San Francisco and New York?<｜Assistant｜></think>

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_datetime">
<｜DSML｜parameter name="timezone" string="true">America/New_York</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls><｜end▁of▁sentence｜>

<function_results>
<result>{"current_date": "2024-01-15"}</result>
</function_results>

</think>

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="location" string="true">San Francisco</｜DSML｜parameter>
<｜DSML｜parameter name="date" string="true">2024-01-16</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="location" string="true">New York</｜DSML｜parameter>
<｜DSML｜parameter name="date" string="true">2024-01-16</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls><｜end▁of▁sentence｜>

<function_results>
<result>{"weather": "partly cloudy"}</result>
<result>{"weather": "sunny"}</result>
</function_results>

</think>Partly cloudy and sunny.<｜end▁of▁sentence｜><｜User｜>Thanks! What about the day after tomorrow?\
<｜Assistant｜><think>I can query directly.</think>

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="location" string="true">San Francisco</｜DSML｜parameter>
<｜DSML｜parameter name="date" string="true">2024-01-17</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls><｜end▁of▁sentence｜>

<function_results>
<result>{"weather": "light rain"}</result>
</function_results>

<think>"""


def test_the_published_conversation_with_thinking() -> None:
    assert FORMAT.render(CONVERSATION, [DATETIME, WEATHER], thinking=True) == Prompt(RENDERED, reasoning=True)


def test_without_thinking_no_reasoning_is_shown() -> None:
    expected = RENDERED.replace("<think>I can query directly.", "").removesuffix("<think>") + "</think>"
    assert FORMAT.render(CONVERSATION, [DATETIME, WEATHER]) == Prompt(expected, reasoning=False)


@pytest.mark.parametrize(
    ("thinking", "variables", "reasons"),
    [
        (None, {}, False),
        (True, {}, True),
        (None, {"thinking": True}, True),
        (None, {"enable_thinking": True}, True),
        (True, {"thinking": False}, False),
        (None, {"thinking": None, "other": 1}, False),
    ],
)
def test_thinking_is_asked_for(thinking: bool | None, variables: dict[str, Any], reasons: bool) -> None:
    prompt = FORMAT.render([user("hello")], thinking=thinking, variables=variables)
    assert prompt == Prompt(f"{BEGIN}<｜User｜>hello<｜Assistant｜>{'<think>' if reasons else '</think>'}", reasons)


def test_a_developer_whom_the_model_answers_is_a_user() -> None:
    developer = {"role": "developer", "content": "Who was it?"}
    expected = f"{BEGIN}<｜User｜>\n\n# The user's message is: Who was it?<｜Assistant｜><think>"
    assert render([developer], thinking=True) == expected
    with_tools = render([developer], [DATETIME])
    assert with_tools.startswith(f"{BEGIN}<｜User｜>\n\n## Tools\n")
    assert with_tools.endswith("\n</functions>\n\n\n# The user's message is: Who was it?<｜Assistant｜></think>")
    turns = [developer, assistant("It was X."), user("Sure?")]
    assert render(turns, thinking=True).startswith(f"{BEGIN}<｜User｜>\n\n# The user's message is: Who was it?<｜Ass")


def test_a_developer_in_front_of_a_user_gives_instructions() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert render([developer, user("Hi")]) == f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜></think>"
    assert render([developer, user("Hi")], [DATETIME]).startswith(f"{BEGIN}Be brief.\n\n## Tools\n")


def test_tools_without_a_system_message() -> None:
    assert render([user("Hi")], [DATETIME]).startswith(f"{BEGIN}\n\n## Tools\n")


def test_the_model_goes_on_behind_a_system_message_of_its_turn() -> None:
    assert render([user("Hi"), system("Now!")]) == f"{BEGIN}<｜User｜>Hi\n\nNow!<｜Assistant｜></think>"
    assert render([system("Speak.")]) == f"{BEGIN}Speak.<｜Assistant｜></think>"
    turns = [user("Hi"), assistant("", call("get_datetime")), result("12"), system("Now!")]
    assert render(turns, thinking=True).endswith("<result>12</result>\n</function_results>\n\nNow!\n\n<think>")


def test_results_come_in_the_order_of_the_calls() -> None:
    calls = (call("get_datetime", "a"), call("get_datetime", "b"))
    turns = [user("Hi"), assistant("", *calls), result("second", "b"), result("first", "a")]
    assert "<result>first</result>\n<result>second</result>\n</function_results>\n\n</think>" in render(turns)


def test_a_result_stands_with_its_call_whatever_the_client_said_between_them() -> None:
    first, second = (assistant("", call("get_datetime", "a"), call("get_datetime", "b")) for _ in range(2))
    arranged = [user("Hi"), first, result("1", "a"), result("2", "b"), user("Go on"), second, result("3", "a")]
    for between in (user("Wait"), system("Wait")):
        expected = render([*arranged, between])
        assert render([*arranged[:3], user("Go on"), result("2", "b"), second, between, result("3", "a")]) == expected


def test_results_without_ids_keep_their_order_and_may_lack() -> None:
    calls = (call("get_datetime", "a"), call("get_datetime", "b"))
    turns = [user("Hi"), assistant("", *calls), {"role": "tool", "content": "first"}, user("Stop")]
    expected = "<result>first</result>\n</function_results>\n\n</think><｜User｜>Stop<｜Assistant｜></think>"
    assert render(turns).endswith(expected)


def test_values_are_written_as_their_types() -> None:
    written = call("get", text='a "b"\n<c>', number=1.5, nothing=None, yes=True, all=["é", {"x": 1}])
    prompt = render([user("Hi"), assistant("Calling.", written), result("")])
    assert prompt.partition("Calling.")[2].startswith(
        """

<｜DSML｜function_calls>
<｜DSML｜invoke name="get">
<｜DSML｜parameter name="text" string="true">a "b"
<c></｜DSML｜parameter>
<｜DSML｜parameter name="number" string="false">1.5</｜DSML｜parameter>
<｜DSML｜parameter name="nothing" string="false">null</｜DSML｜parameter>
<｜DSML｜parameter name="yes" string="false">true</｜DSML｜parameter>
<｜DSML｜parameter name="all" string="false">["é", {"x": 1}]</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls><｜end▁of▁sentence｜>

<function_results>
<result></result>"""
    )


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("", "\n\n"),
        ("{}", "\n\n"),
        ('{"a": "b', '\n<｜DSML｜parameter name="arguments" string="true">{"a": "b</｜DSML｜parameter>\n'),
        ("[1]", '\n<｜DSML｜parameter name="arguments" string="true">[1]</｜DSML｜parameter>\n'),
    ],
)
def test_a_conversation_goes_on_after_a_broken_call(arguments: str, written: str) -> None:
    broken = {"id": "a", "type": "function", "function": {"name": "get_datetime", "arguments": arguments}}
    prompt = render([user("Hi"), assistant("", broken), result("that was no JSON", "a")])
    assert f'<｜DSML｜invoke name="get_datetime">{written}</｜DSML｜invoke>' in prompt


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([], "^expected at least one"),
        ([user("Hi"), assistant("Ho")], "^expected .*assistant"),
        ([result("x")], "^message 0: .* found 1 for 0"),
        ([user("Hi"), assistant("", call("f")), result("x"), result("y")], "^message 2: .* found 2 for 1"),
        ([user("Hi"), {"role": "robot", "content": ""}], "^message 1: .* role .*'robot'"),
    ],
)
@pytest.mark.parametrize("tools", [[], [DATETIME]])
def test_what_cannot_be_rendered_is_named(messages: list[dict[str, Any]], names: str, tools: list[Any]) -> None:
    with pytest.raises(FormatError, match=names):
        render(messages, tools)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("whole_calls", [False, True])
def test_the_parser_reads_what_the_encoder_writes(thinking: bool, whole_calls: bool) -> None:
    tools = [tool("f", {"a": {}, "b": {}}), DATETIME]
    answers = [
        assistant(
            "Two calls.", call("f", a="<｜x", b=[1, {"c": None}]), call("get_datetime", timezone=""), reasoning="R"
        ),
        assistant("", call("f"), reasoning=""),
        assistant("No call.\n", reasoning="Long\n\nreasons."),
    ]
    for answer in answers:
        turns = [user("Hi")]
        prompt = FORMAT.render(turns, tools, thinking=thinking)
        following = [result("x")] * len(answer.get("tool_calls", ())) or [system("")]
        whole = FORMAT.render([*turns, answer, *following], tools, thinking=thinking).text
        text = whole.removeprefix(prompt.text).partition(END)[0]
        events = parse(
            FORMAT.parser(CallRules(ToolSet(tools)), reasoning=prompt.reasoning, whole_calls=whole_calls), list(text)
        )
        assert reasoning_of(events) == (answer["reasoning_content"] if thinking else "")
        assert content_of(events) == answer["content"]
        assert [(made.name, made.arguments) for made in calls_of(events)] == [
            (wanted["function"]["name"], wanted["function"]["arguments"]) for wanted in answer.get("tool_calls", ())
        ]
