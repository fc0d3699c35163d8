# ruff: noqa: RUF001 - DSML has full-width bars
"""Formats that a Jinja template renders, and which format a checkpoint has."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.formats.conversation import FormatError, PromptEnd
from gateway.formats.families import CALL_PARSERS, ChatFormat, choose_format
from gateway.formats.parsing import ContentDelta
from gateway.formats.tools import CallRules, ToolSet
from tests.gateway.formats.examples import TOOLS, calls_of, content_of, parse, reasoning_of, tool

GLM = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- if m.reasoning_content -%}{{ '<think>' + m.reasoning_content }}{%- endif -%}
{{- '</think>' -}}
{{- m.content -}}
{%- for tc in m.tool_calls or [] -%}
{{- '<tool_call>' + tc.function.name -}}
{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) \
if v is not string else v }}</arg_value>{% endfor %}</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- elif m.role == 'system' -%}<|system|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
<|assistant|>{{- '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' -}}
"""
"""In the forms of the zai-org/GLM-5 checkpoints' template, but for what it says of the tools."""
HERMES = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for tc in m.tool_calls or [] %}
<tool_call>
{"name": "{{ tc.function.name }}", "arguments": {{ tc.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{{ tools | tojson if tools else '' }}<|im_start|>assistant{{ '\\n' }}"""


def format_of(template: str, **options: Any) -> ChatFormat:
    def apply(
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        end: PromptEnd,
    ) -> str:
        # As transformers' apply_chat_template does it, in a sandbox.
        rendered, _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=end is PromptEnd.NEW_ANSWER,
            **variables,
        )
        return str(rendered[0])

    chosen = choose_format("glm_moe_dsa", template=template, apply=apply, **options)
    assert chosen is not None
    return chosen


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "Hi"}


def test_glm_reasons_unless_told_otherwise() -> None:
    glm = format_of(GLM)
    for options, reasons in (
        ({}, True),
        ({"thinking": True}, True),
        ({"thinking": False}, False),
        ({"variables": {"enable_thinking": False}}, False),
        ({"variables": {"enable_thinking": True}, "thinking": False}, True),
    ):
        prompt = glm.render([USER], **options)
        assert prompt.text == f"[gMASK]<sop><|user|>Hi<|assistant|>{'<think>' if reasons else '</think>'}"
        assert prompt.reasoning == reasons


@pytest.mark.parametrize("options", [{"thinking": False}, {"variables": {"enable_thinking": False}}])
def test_a_template_that_always_reasons_says_so(options: dict[str, Any]) -> None:
    """As that of GLM-5.3."""
    always = format_of(GLM.replace("'</think>' if (enable_thinking is defined and not enable_thinking) else ", ""))
    assert always.render([USER]).reasoning
    with pytest.raises(FormatError, match="always reasons: reasoning_effort 'none'"):
        always.render([USER], **options)


def test_a_template_gets_what_it_expects() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "R",
            "tool_calls": [call("f", '{"a": "x", "b": [1, "é"]}'), call("g", "")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]
    assert format_of(GLM).render(messages).text == (
        "[gMASK]<sop><|system|>Be brief.<|user|>Hi<|assistant|><think>R</think><tool_call>f<arg_key>a</arg_key>"
        '<arg_value>x</arg_value><arg_key>b</arg_key><arg_value>[1, "é"]</arg_value></tool_call>'
        "<tool_call>g</tool_call><|observation|><tool_response>12</tool_response><|assistant|><think>"
    )
    assert messages[0]["role"] == "developer"
    assert messages[2]["content"] is None


def test_a_template_that_knows_developers_gets_them() -> None:
    template = "{% for m in messages %}{{ m.role }} {% endfor %}{# developer #}"
    assert format_of(template).render([{"role": "developer", "content": ""}, USER]).text == "developer user "


def test_tools_are_handed_to_the_template() -> None:
    text = format_of(GLM).render([USER], TOOLS[:1]).text
    assert text.startswith("[gMASK]<sop><|system|>\n# Tools\n" + json.dumps(TOOLS[0]) + "\n")


@pytest.mark.parametrize(("template", "end"), [(GLM, "<|assistant|>"), (HERMES, "<|im_end|>")])
@pytest.mark.parametrize("whole_calls", [False, True])
def test_the_parser_reads_what_the_template_writes(template: str, end: str, whole_calls: bool) -> None:
    tools = [
        tool(
            "f", {"text": {"type": "string"}, "all": {"type": "array"}, "free": {}, "n": {"type": ["string", "null"]}}
        ),
        tool("g"),
    ]
    calls = [
        call("f", '{"text": "12 <b>\\n\\"é\\"", "all": [1, {"c": null}], "free": 1.5, "n": "null and void"}'),
        call("f", '{"text": "", "free": "some text", "n": null}'),
        call("g", "{}"),
    ]
    answer = {"role": "assistant", "content": "Calling.", "reasoning_content": "R", "tool_calls": calls}
    chosen = format_of(template)
    prompt = chosen.render([USER])
    text = chosen.render([USER, answer]).text.removeprefix(prompt.text).partition(end)[0]
    events = parse(
        chosen.parser(CallRules(ToolSet(tools)), reasoning=prompt.reasoning, whole_calls=whole_calls), list(text)
    )
    assert reasoning_of(events) == ("R" if prompt.reasoning else "")
    assert content_of(events) == "Calling."
    assert [(made.name, json.loads(made.arguments)) for made in calls_of(events)] == [
        (wanted["function"]["name"], json.loads(wanted["function"]["arguments"])) for wanted in calls
    ]


def test_the_syntax_of_calls_is_the_one_that_the_template_teaches() -> None:
    assert format_of(GLM).name == "glm47"
    assert format_of(HERMES).name == "hermes"
    assert format_of("{{ tools }} <｜DSML｜function_calls>").name == "deepseek_v32"
    # DeepSeek-V3.2-Exp and V3.1.
    assert format_of("{{ tools }} <｜tool▁calls▁begin｜> </think>").name == "none"
    assert format_of("{{ messages }}").name == "none"
    assert format_of(HERMES, call_parser="glm47").name == "glm47"
    assert format_of(HERMES, call_parser="none").name == "none"


def test_without_a_syntax_calls_are_text() -> None:
    chosen = format_of("{{ messages }}")
    assert chosen.call_grammar(CallRules(ToolSet(TOOLS), parallel=False)) is None
    assert chosen.end_of_reasoning is None
    text = "<think>a</think><tool_call>get_datetime</tool_call>"
    assert parse(chosen.parser(CallRules(ToolSet(TOOLS)), reasoning=False), list(text)) == [ContentDelta(text)]


def test_reasoning_may_stay_in_the_content() -> None:
    chosen = format_of(GLM, parse_reasoning=False)
    prompt = chosen.render([USER])
    assert prompt.text.endswith("<think>")
    assert not prompt.reasoning
    assert chosen.end_of_reasoning is None
    assert parse(chosen.parser(CallRules(ToolSet(TOOLS)), reasoning=prompt.reasoning), ["R</think>x"]) == [
        ContentDelta("R</think>x")
    ]


def test_only_deepseek_has_a_format_without_a_template() -> None:
    assert choose_format("glm_moe_dsa", template=None) is None
    chosen = choose_format("deepseek_v32", template=None)
    assert chosen is not None
    assert chosen.name == "deepseek_v32"
    assert chosen.markers == {"<think>", "</think>", "｜DSML｜"}


def test_a_call_parser_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=f"of {', '.join(CALL_PARSERS)}, found xml"):
        format_of(GLM, call_parser="xml")
    with pytest.raises(ValueError, match=r"deepseek_v32 .* found hermes"):
        choose_format("deepseek_v32", template=None, call_parser="hermes")
