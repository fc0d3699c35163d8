# ruff: noqa: RUF001 - DSML has full-width bars
"""Tools and answers of each family, and what a parser should make of them.

The DSML answers are those of `encoding/test_input.json` and `test_output*.txt` in the deepseek-ai/DeepSeek-V3.2
checkpoint, shortened, and of the docstring of vLLM's DeepSeek-V3.2 parser. The GLM answers follow what the chat
template of the zai-org/GLM-5 checkpoints says about calls and the docstring of SGLang's GLM-4.7 parser. The Hermes
answers follow Qwen2.5's chat template.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gateway.formats.families import ChatFormat, choose_format
from gateway.formats.parsing import CallArguments, CallBegin, CallEnd, CallParser, ContentDelta, Event, ReasoningDelta
from gateway.formats.tools import CallRules, ToolSet


def tool(name: str, properties: dict[str, Any] | None = None, required: list[str] | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, "required": required or []}
    return {"type": "function", "function": {"name": name, "description": f"About {name}.", "parameters": parameters}}


TOOLS = [
    tool("get_datetime", {"timezone": {"type": "string"}}),
    tool("get_weather", {"location": {"type": "string"}, "date": {"type": "string"}}, ["location"]),
    tool(
        "get",
        {
            "id": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "topn": {"type": "integer"},
            "source": {"type": "string", "enum": ["web", "news"]},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "lines": {"type": "array", "items": {"type": "string"}},
            "note": {},
        },
    ),
]


@dataclass(frozen=True)
class Example:
    """One answer. calls: name and arguments, as JSON text, of each call."""

    family: str
    text: str
    reasoning: str | None
    content: str
    calls: tuple[tuple[str, str], ...] = ()


def weather(place: str, day: str) -> tuple[str, str]:
    return "get_weather", f'{{"location": "{place}", "date": "{day}"}}'


_DSML_WEATHER = """<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="location" string="true">%s</｜DSML｜parameter>
<｜DSML｜parameter name="date" string="true">2024-01-16</｜DSML｜parameter>
</｜DSML｜invoke>
"""

EXAMPLES = (
    Example("dsml", "Hello! I am DeepSeek.", None, "Hello! I am DeepSeek."),
    Example("dsml", "thinking...</think>Hello! I am DeepSeek.", "thinking...", "Hello! I am DeepSeek."),
    Example(
        "dsml",
        "Now I know today is 2024-01-15.\nLet me query.</think>\n\n<｜DSML｜function_calls>\n"
        + _DSML_WEATHER % "San Francisco"
        + _DSML_WEATHER % "北京"
        + "</｜DSML｜function_calls>",
        "Now I know today is 2024-01-15.\nLet me query.",
        "",
        (weather("San Francisco", "2024-01-16"), weather("北京", "2024-01-16")),
    ),
    Example(
        "dsml",
        'I search.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n'
        '<｜DSML｜parameter name="note" string="true">"16,201,670"\n\tdoses < 2\\3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="topn" string="false">10</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="where" string="false">{"a": ["<b>", null, 1.5e3]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="source" string="true"></｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        None,
        "I search.",
        (
            (
                "get",
                '{"note": "\\"16,201,670\\"\\n\\tdoses < 2\\\\3", "topn": 10, "where": {"a": ["<b>", null, 1.5e3]}, '
                '"exact": true, "source": ""}',
            ),
        ),
    ),
    Example(
        "dsml",
        'Now:\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_datetime">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        None,
        "Now:",
        (("get_datetime", "{}"),),
    ),
    Example("glm", "Plain <b>text</b>\n with a < b.\n", None, "Plain <b>text</b>\n with a < b.\n"),
    Example(
        "glm",
        "Two cities.</think>I ask.<tool_call>get_weather<arg_key>location</arg_key><arg_value>北京</arg_value>"
        "<arg_key>date</arg_key><arg_value>2024-06-27</arg_value></tool_call>"
        "<tool_call>get_weather<arg_key>location</arg_key><arg_value>上海</arg_value>"
        "<arg_key>date</arg_key><arg_value>2024-06-27</arg_value></tool_call>",
        "Two cities.",
        "I ask.",
        (weather("北京", "2024-06-27"), weather("上海", "2024-06-27")),
    ),
    Example(
        "glm",
        "<tool_call>get<arg_key>topn</arg_key><arg_value>10</arg_value><arg_key>source</arg_key><arg_value>12"
        '</arg_value><arg_key>where</arg_key><arg_value>{"a": ["<b>", null]}</arg_value><arg_key>id</arg_key>'
        "<arg_value>https://e.org/?a<b</arg_value><arg_key>note</arg_key><arg_value>true</arg_value></tool_call>",
        None,
        "",
        (
            (
                "get",
                '{"topn": 10, "source": "12", "where": {"a": ["<b>", null]}, "id": "https://e.org/?a<b", "note": true}',
            ),
        ),
    ),
    Example(
        "glm",
        "<tool_call>get_datetime</tool_call>\n<tool_call>get_datetime\n<arg_key>timezone</arg_key>\n<arg_value>UTC"
        "</arg_value>\n</tool_call>",
        None,
        "",
        (("get_datetime", "{}"), ("get_datetime", '{"timezone": "UTC"}')),
    ),
    Example(
        "hermes",
        'So.</think>I ask.\n<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris", "date": "x"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_datetime", "arguments": {}}\n</tool_call>',
        "So.",
        "I ask.",
        (weather("Paris", "x"), ("get_datetime", "{}")),
    ),
)

_TEMPLATES = {
    "dsml": "{{ tools }} ｜DSML｜ <think></think>",
    "glm": "{{ tools }} <tool_call> <arg_key> <think></think>",
    "hermes": "{{ tools }} <tool_call> <think></think>",
}


def parsing_format(family: str) -> ChatFormat:
    """A format that parses as a family does. It renders nothing."""
    found = choose_format("", template=_TEMPLATES[family], apply=lambda *_: "")
    assert found is not None
    return found


def parser_of(family: str, *, reasoning: bool, whole_calls: bool = False) -> CallParser:
    parser = parsing_format(family).parser(CallRules(ToolSet(TOOLS)), reasoning=reasoning, whole_calls=whole_calls)
    numbers = itertools.count()
    parser.new_id = lambda: f"call_{next(numbers)}"
    return parser


def parse(parser: CallParser, pieces: list[str]) -> list[Event]:
    """All events, those of one kind that follow each other put together."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return list(joined([*events, *parser.finish()]))


def joined(events: list[Event]) -> Iterator[Event]:
    last: Event | None = None
    for event in events:
        if isinstance(event, ReasoningDelta | ContentDelta) and type(event) is type(last):
            last = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            last = CallArguments(event.index, last.text + event.text)
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


@dataclass
class Call:
    """A call as events told of it."""

    call_id: str
    name: str
    arguments: str = ""
    ended: bool = False


def calls_of(events: list[Event]) -> list[Call]:
    """The calls. Asserts that they come in order, each begun before it is told of, none told of after its end."""
    calls: list[Call] = []
    for event in events:
        match event:
            case CallBegin(index, call_id, name):
                assert index == len(calls)
                calls.append(Call(call_id, name))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                assert not calls[index].ended
                calls[index].arguments += text
            case CallEnd(index):
                assert index == len(calls) - 1
                assert not calls[index].ended
                calls[index].ended = True
    return calls


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def reasoning_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta))
