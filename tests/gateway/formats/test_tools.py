"""What the parsers learn from the tools' JSON schemas, which clients write."""

from typing import Any

import pytest

from gateway.formats.tools import MAX_STEPS, CallRules, ToolSet, json_type, parse_json
from tests.gateway.formats.examples import parsing_format, tool
from tests.gateway.formats.test_call_grammar import accepts


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


class Counted(dict[str, Any]):
    """A schema that counts how often it is read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.reads += key == "$ref"
        return super().get(key, default)


def types(properties: dict[str, Any], definitions: dict[str, Any]) -> dict[str, frozenset[str] | None]:
    made = tool("f", properties)
    made["function"]["parameters"]["$defs"] = definitions
    tools = ToolSet([made])
    Counted.reads = 0
    return {key: tools.types("f", key) for key in properties}


def test_each_part_of_a_schema_is_read_once() -> None:
    definitions: dict[str, Any] = {"d0": Counted(type="string")}
    for number in range(1, 7):
        branches = [Counted({"$ref": f"#/$defs/d{number - 1}"}) for _ in range(40)]
        definitions[f"d{number}"] = Counted(anyOf=branches)
    found = types({"a": {"$ref": "#/$defs/d6"}, "b": {"$ref": "#/$defs/d6"}}, definitions)
    assert found == {"a": {"string"}, "b": {"string"}}
    assert Counted.reads == 1 + 6 * 41


@pytest.mark.parametrize("union", ["anyOf", "oneOf", "allOf"])
def test_a_definition_that_refers_to_itself_is_read_once(union: str) -> None:
    itself = Counted({union: [Counted({"$ref": "#/$defs/d"}) for _ in range(40)]})
    assert types({"a": {"$ref": "#/$defs/d"}}, {"d": itself}) == {"a": None}
    assert Counted.reads == 41


def test_a_long_chain_of_references_says_nothing() -> None:
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(5000)}
    assert types({"a": {"$ref": "#/$defs/d0"}}, {**chain, "d5000": {"type": "string"}}) == {"a": None}


def test_what_is_read_of_the_schemas_of_a_request_is_bounded() -> None:
    union = {"anyOf": [Counted(type="string") for _ in range(1000)]}
    properties = {f"a{number}": {"anyOf": [Counted(type="string") for _ in range(1000)]} for number in range(40)}
    found = types({"whole": union, "huge": {"enum": ["a"] * MAX_STEPS}, **properties}, {})
    assert found["whole"] == {"string"}
    assert found["huge"] is None
    assert found["a0"] == {"string"}
    assert found["a39"] is None
    assert Counted.reads <= MAX_STEPS


def test_an_argument_that_the_schema_does_not_name() -> None:
    assert ToolSet([tool("f")]).types("f", "a") is None


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize("parameters", [None, True, {}, {"properties": 5, "required": 5}, {"required": [5]}, LOOP])
def test_schemas_that_say_nothing(parameters: Any) -> None:
    tools = ToolSet([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools["f"].properties == {}
    assert tools["f"].required == frozenset()
    assert tools.types("f", "a") is None


def test_a_schema_may_refer_to_the_one_that_names_the_arguments() -> None:
    """As pydantic writes a recursive model, and Zod one with a name."""
    node = {"properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}}, "required": ["name"]}
    parameters = {"$ref": "#/$defs/Tree", "$defs": {"Tree": {"$ref": "#/$defs/Node"}, "Node": node}}
    made = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert ToolSet([made])["f"].properties == node["properties"]
    assert ToolSet([made])["f"].required == {"name"}
    assert ToolSet([made]).types("f", "name") == {"string"}
    grammar = parsing_format("glm").call_grammar(CallRules(ToolSet([made]), forced=True))
    assert grammar is not None
    calls = (
        f"<tool_call>f{argument}</tool_call>" for argument in ("", "<arg_key>name</arg_key><arg_value>7</arg_value>")
    )
    assert [accepts(grammar, call) for call in calls] == [False, True]


def test_required_arguments_without_a_schema_are_known() -> None:
    assert ToolSet([tool("f", {"a": {"type": "null"}}, ["b"])])["f"].properties == {"a": {"type": "null"}, "b": {}}


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
