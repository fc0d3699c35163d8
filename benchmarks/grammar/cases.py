"""Grammars, each with a real answer."""

import json

from control.grammar import JSON_OBJECT, JsonSchema, Lark, Regex, Structure, TextChoice
from gateway.formats.conversation import Prompt
from gateway.formats.families import ChatFormat
from gateway.formats.glm import GlmParser
from gateway.formats.tools import CallRules, ToolSet

_ANSWER = json.dumps(
    {
        "name": "get_weather_in_several_cities",
        "arguments": {"cities": ["Paris", "San Francisco", "Reykjavik"], "unit": "celsius", "days": 12},
        "comment": "A longer text, as the value of a property, with some words that a model may well write in it. " * 3,
        "scores": [1, 2.5, -3, 0.125, 1e-3],
        "nested": [{"a": i, "b": {"c": None, "d": i % 2 == 0}} for i in range(6)],
    },
    indent=1,
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "arguments": {
            "type": "object",
            "properties": {
                "cities": {"type": "array", "items": {"type": "string", "maxLength": 40}},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1},
            },
            "required": ["cities"],
        },
        "comment": {"type": "string"},
        "scores": {"type": "array", "items": {"type": "number"}},
        "nested": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
_WIDE = {
    "type": "object",
    "properties": {f"property_{i}": {"type": ["string", "integer"], "description": "x" * 30} for i in range(120)},
}


def _tool_call() -> tuple[Structure, str]:
    """A required call in GLM's format."""
    tools = ToolSet([{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}])
    glm = ChatFormat(lambda *_: Prompt("", reasoning=False), GlmParser, reasons=False)
    grammar = glm.call_grammar(CallRules(tools, forced=True, parallel=False))
    assert grammar is not None
    arguments = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for key, value in json.loads(_ANSWER).items()
    )
    return Lark(grammar=grammar), f"<tool_call>f{arguments}</tool_call>"


CASES: dict[str, tuple[Structure, str]] = {
    "json_object": (JSON_OBJECT, _ANSWER),
    "json_schema": (JsonSchema(schema_text=json.dumps(_SCHEMA)), _ANSWER),
    f"json_schema of {len(json.dumps(_WIDE)) / 1024:.0f} KiB": (
        JsonSchema(schema_text=json.dumps(_WIDE)),
        json.dumps({f"property_{i}": f"some value {i}" if i % 2 else i for i in range(120)}),
    ),
    "regex": (
        Regex(pattern=r"([A-Z][a-z]+ )+[0-9]{4}-[0-9]{2}(, [a-z ]+)*\."),
        "The Report 2024-05" + ", some words" * 40 + ".",
    ),
    "choice of 1000": (TextChoice(options=tuple(f"option number {i}" for i in range(1000))), "option number 777"),
    "tool call": _tool_call(),
}
