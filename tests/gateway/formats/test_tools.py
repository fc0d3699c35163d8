"""What the parsers learn from the tools' JSON schemas, which clients write."""

from typing import Any

import pytest

from gateway.formats.tools import ToolSet, json_type, parse_json
from tests.gateway.formats.examples import tool


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "number", "null"}),
        ({"type": "string", "enum": ["a", 1]}, {"string"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "array"}, {"type": "object"}]}, {"array", "object"}),
        ({"oneOf": [{"type": "array"}, {}]}, None),
        ({"allOf": [{"type": ["string", "array"]}, {"type": ["string", "null"]}]}, {"string"}),
        ({"$ref": "#/$defs/text"}, {"string"}),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/nowhere/to/go"}, None),
        ({"$ref": "https://e.org/schema"}, None),
        ({}, None),
        (True, None),
        ({"type": 5, "enum": 5, "anyOf": 5, "allOf": [5], "$ref": 5}, None),
        ({"type": "tuple"}, None),
    ],
)
def test_types_of_an_argument(schema: Any, types: set[str] | None) -> None:
    made = tool("f", {"a": schema})
    made["function"]["parameters"]["$defs"] = {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    found = ToolSet([made]).types("f", "a")
    assert found == (None if types is None else frozenset(types))


def test_an_argument_that_the_schema_does_not_name() -> None:
    assert ToolSet([tool("f")]).types("f", "a") is None


@pytest.mark.parametrize("parameters", [None, True, {}, {"properties": 5, "required": 5}, {"required": [5]}])
def test_schemas_that_say_nothing(parameters: Any) -> None:
    tools = ToolSet([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools.properties("f") == {}
    assert tools.required("f") == ()
    assert tools.types("f", "a") is None


def test_required_arguments_without_a_schema_are_known() -> None:
    assert ToolSet([tool("f", {"a": {"type": "null"}}, ["b"])]).properties("f") == {"a": {"type": "null"}, "b": {}}


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "[" * 100_000, "", "'a'", "True", "1 2"])
def test_json_is_strict(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|deeply|Expecting|Extra"):
        parse_json(text)


def test_types_of_values() -> None:
    values = [None, False, 0, 1.5, "", [], {}]
    assert [json_type(value) for value in values] == [
        "null",
        "boolean",
        "number",
        "number",
        "string",
        "array",
        "object",
    ]
