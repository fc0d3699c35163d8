# ruff: noqa: RUF001 - DSML has full-width bars
"""What parsers make of answers, however these are cut; and when they give out what."""

import json
import time

import pytest

from gateway.formats.parsing import CallArguments, CallBegin, CallEnd, ContentDelta, ReasoningDelta
from gateway.formats.tools import CallRules, ToolSet
from tests.gateway.formats.examples import (
    EXAMPLES,
    TOOLS,
    Example,
    calls_of,
    content_of,
    parse,
    parser_of,
    parsing_format,
    reasoning_of,
    tool,
)
from tests.gateway.formats.test_json_prefix import is_json

_IDS = [f"{example.family}-{number}" for number, example in enumerate(EXAMPLES)]


def parser_for(example: Example, *, whole_calls: bool = False):
    return parser_of(example.family, reasoning=example.reasoning is not None, whole_calls=whole_calls)


@pytest.mark.parametrize("example", EXAMPLES, ids=_IDS)
@pytest.mark.parametrize("whole_calls", [False, True])
def test_an_answer_becomes_reasoning_content_and_calls_however_it_is_cut(example: Example, whole_calls: bool) -> None:
    text = example.text
    events = parse(parser_for(example, whole_calls=whole_calls), [text])
    assert reasoning_of(events) == (example.reasoning or "")
    assert content_of(events) == example.content
    assert [(call.name, call.arguments, call.ended) for call in calls_of(events)] == [
        (*call, True) for call in example.calls
    ]
    for pieces in (list(text), *([text[:at], text[at:]] for at in range(len(text) + 1))):
        assert parse(parser_for(example, whole_calls=whole_calls), pieces) == events


@pytest.mark.parametrize("example", EXAMPLES, ids=_IDS)
def test_an_answer_that_ends_early_invents_nothing(example: Example) -> None:
    for end in range(len(example.text)):
        events = parse(parser_for(example), [example.text[:end]])
        for call, (name, arguments) in zip(calls_of(events), example.calls, strict=False):
            assert call.name == name
            assert call.arguments == arguments if call.ended else not is_json(call.arguments)
        whole = parse(parser_for(example, whole_calls=True), [example.text[:end]])
        assert [(call.name, call.arguments) for call in calls_of(whole)] == [
            (call.name, call.arguments) for call in calls_of(events) if call.ended
        ]


def test_strings_stream_and_other_values_wait_for_their_end() -> None:
    parser = parser_of("glm", reasoning=False)
    given = []
    for piece in (
        "<tool_call>get_wea",
        "ther<arg_key>location</arg_key><arg_val",
        'ue>Ber"',
        "lin</arg",
        "_value><arg_key>topn</arg_key><arg_value>1",
        "0</arg_value>",
        "</tool_call>",
    ):
        given.append(parser.push(piece))
    assert given == [
        [],
        [],
        [CallBegin(0, "call_0", "get_weather"), CallArguments(0, '{"location": "Ber\\"')],
        [CallArguments(0, "lin")],
        [CallArguments(0, '"')],
        [CallArguments(0, ', "topn": 10')],
        [CallArguments(0, "}"), CallEnd(0)],
    ]


def test_arrays_and_objects_stream() -> None:
    parser = parser_of("dsml", reasoning=False)
    assert parser.push('<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="where"') == []
    given = [parser.push(piece) for piece in (' string="false"> {"a": [1', '0, "<b', "\n", ' 1"]}')]
    assert given == [
        [CallBegin(0, "call_0", "get"), CallArguments(0, '{"where": {"a": [1')],
        [CallArguments(0, '0, "<b')],
        [],
        [],
    ]
    assert parser.finish() == [ContentDelta('\n 1"]}')]


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = parser_of("dsml", reasoning=True)
    assert parser.push("a <b </thi") == [ReasoningDelta("a <b ")]
    assert parser.push("s </think>") == [ReasoningDelta("</this ")]
    assert parser.push("x \n") == [ContentDelta("x")]
    assert parser.push("<｜DS") == []
    assert parser.push("X") == [ContentDelta(" \n<｜DSX")]
    assert parser.push(" \n") == []
    assert parser.finish() == [ContentDelta(" \n")]


def test_without_tools_everything_is_text_at_once() -> None:
    for family in ("dsml", "glm", "hermes"):
        text = "a <tool_call>get_datetime</tool_call> <｜DSML｜function_calls>\n "
        assert parsing_format(family).parser(CallRules(ToolSet(())), reasoning=False).push(text) == [ContentDelta(text)]


BROKEN = [
    ("glm", "<tool_call>get_wealth<arg_key>location</arg_key><arg_value>x</arg_value></tool_call>"),
    ("glm", "<tool_call>get_weather</tool_call>"),
    ("glm", "<tool_call></tool_call>"),
    ("glm", "<tool_call>get<arg_key></arg_key><arg_value>1</arg_value></tool_call>"),
    ("glm", "<tool_call>get<arg_key>topn</arg_key><arg_value>ten</arg_value></tool_call>"),
    ("glm", "<tool_call>get<arg_key>topn</arg_key><arg_value>10 20</arg_value></tool_call>"),
    ("glm", "<tool_call>get<arg_key>topn</arg_key><arg_value></arg_value></tool_call>"),
    ("glm", "<tool_call>get<arg_value>10</arg_value></tool_call>"),
    ("dsml", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    ("dsml", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="rm">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
    (
        "dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    (
        "dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="topn" string="false">NaN'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        "dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="topn">10'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_datetime", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_datetime"}</tool_call>'),
    ("hermes", '<tool_call>["get_datetime"]</tool_call>'),
    ("hermes", "<tool_call>get_datetime</tool_call>"),
]


@pytest.mark.parametrize(("family", "text"), BROKEN)
@pytest.mark.parametrize("whole_calls", [False, True])
def test_what_is_no_call_is_content(family: str, text: str, whole_calls: bool) -> None:
    around = f"before\n{text}\nafter"
    parser = parser_of(family, reasoning=False, whole_calls=whole_calls)
    assert parse(parser, [around]) == [ContentDelta(around)]


def test_a_call_that_breaks_late_has_no_end_and_the_rest_is_content() -> None:
    begin = "<tool_call>get<arg_key>source</arg_key><arg_value>web</arg_value>"
    rest = "<arg_key>source</arg_key><arg_value>news</arg_value></tool_call>"
    events = parse(parser_of("glm", reasoning=False), [begin + rest])
    assert events == [CallBegin(0, "call_0", "get"), CallArguments(0, '{"source": "web"'), ContentDelta(rest)]
    assert parse(parser_of("glm", reasoning=False, whole_calls=True), [begin + rest]) == [ContentDelta(begin + rest)]


def test_calls_behind_a_broken_one_are_read() -> None:
    call = "<tool_call>get_datetime</tool_call>"
    events = parse(parser_of("glm", reasoning=False), ["<tool_call>rm</tool_call>" + call + "<tool_call>" + call])
    assert content_of(events) == "<tool_call>rm</tool_call><tool_call>"
    assert [call.name for call in calls_of(events)] == ["get_datetime", "get_datetime"]


def test_an_answer_that_ends_in_a_string_keeps_the_string_with_the_call() -> None:
    text = "<tool_call>get_weather<arg_key>location</arg_key><arg_value>Berl</arg"
    events = parse(parser_of("glm", reasoning=False), [text])
    assert events == [CallBegin(0, "call_0", "get_weather"), CallArguments(0, '{"location": "Berl</arg')]


def test_markers_in_reasoning_are_reasoning() -> None:
    text = "I could write <tool_call>get_datetime</tool_call> here."
    assert parse(parser_of("glm", reasoning=True), [text]) == [ReasoningDelta(text)]


def test_names_that_begin_other_names() -> None:
    tools = [tool("a"), tool("ab"), tool("a-b")]
    for name in ("a", "ab", "a-b"):
        for family, text in (
            ("glm", f"<tool_call>{name}</tool_call>"),
            (
                "dsml",
                f'<｜DSML｜function_calls><｜DSML｜invoke name="{name}"></｜DSML｜invoke></｜DSML｜function_calls>',
            ),
        ):
            events = parse(parsing_format(family).parser(CallRules(ToolSet(tools)), reasoning=False), list(text))
            assert [(call.name, call.arguments) for call in calls_of(events)] == [(name, "{}")]


def test_ids_are_random_unless_given() -> None:
    text = "<tool_call>get_datetime</tool_call>" * 2
    events = parse(parsing_format("glm").parser(CallRules(ToolSet(TOOLS)), reasoning=False), [text])
    first, second = (call.call_id for call in calls_of(events))
    assert first != second
    assert first.startswith("call_")


def test_a_long_answer_takes_time_in_proportion_to_its_length() -> None:
    value = "x<y " * 50_000
    parser = parser_of("glm", reasoning=False)
    text = f"<tool_call>get_weather<arg_key>location</arg_key><arg_value>{value}</arg_value></tool_call>"
    events = [event for at in range(0, len(text), 4) for event in parser.push(text[at : at + 4])]
    (call,) = calls_of([*events, *parser.finish()])
    assert json.loads(call.arguments) == {"location": value}


@pytest.mark.parametrize(
    ("piece", "pieces"), [(" " * 64, 20_000), ("<tool_call>" * 150_000, 1)], ids=["white space", "markers"]
)
def test_an_answer_of_one_token_over_and_over_costs_little(piece: str, pieces: int) -> None:
    """A client has the model write it by `logit_bias`. White space may belong to a call; markers begin none here."""
    began = time.thread_time()
    assert content_of(parse(parser_of("glm", reasoning=False), [piece] * pieces)) == piece * pieces
    assert time.thread_time() - began < 5.0, "in proportion to its length it takes a tenth of that"


def test_a_call_in_a_value_that_is_no_json_is_not_read() -> None:
    begin = '<tool_call>get<arg_key>where</arg_key><arg_value>{"a": '
    rest = "x<tool_call>get_datetime</tool_call></arg_value></tool_call>"
    assert_breaks(begin, '{"where": {"a": ', rest)
    assert_breaks(begin + "1}", '{"where": {"a": 1}', " \n" + rest)


def assert_breaks(begin: str, arguments: str, rest: str) -> None:
    for cut_into in ([begin + rest], list(begin + rest)):
        events = parse(parser_of("glm", reasoning=False), cut_into)
        assert events == [CallBegin(0, "call_0", "get"), CallArguments(0, arguments), ContentDelta(rest)]
        whole = parse(parser_of("glm", reasoning=False, whole_calls=True), cut_into)
        assert whole == [ContentDelta(begin + rest)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get<arg_key>" + "k" * 300,
        "<tool_call>get<arg_key>a\nb</arg_key><arg_value>1</arg_value></tool_call>",
    ],
)
def test_an_argument_without_a_proper_name_is_text(text: str) -> None:
    parser = parser_of("glm", reasoning=False)
    assert parser.push(text) == [ContentDelta(text)]
