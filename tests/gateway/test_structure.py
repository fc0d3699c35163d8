"""What the text of an answer has to look like, as decode nodes are told."""

import json
from typing import Any

import openai
import pytest

from control.grammar import JSON_OBJECT, Grammar, JsonSchema, Lark, Regex, Structure, TextChoice
from tests.gateway.world import QUESTION, WEATHER, World

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS: list[tuple[dict[str, Any], Structure]] = [
    ({"response_format": {"type": "json_object"}}, JSON_OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        JsonSchema(schema_text=json.dumps(SCHEMA)),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(schema_text=json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "a+"}}, Regex(pattern="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, TextChoice(options=("a", "b"))),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Lark(grammar='start: "a"')),
    ({"structured_outputs": {"json_object": True}}, JSON_OBJECT),
    ({"guided_json": json.dumps(SCHEMA)}, JsonSchema(schema_text=json.dumps(SCHEMA))),
    ({"guided_regex": "b"}, Regex(pattern="b")),
    ({"guided_choice": ["c"]}, TextChoice(options=("c",))),
]


@pytest.mark.parametrize(("fields", "structure"), FORMS)
def test_nodes_are_told_the_structure(fresh: World, fields: dict[str, Any], structure: Structure) -> None:
    assert fresh.http.post("/v1/completions", json={"prompt": "a", **fields}).status_code == 200
    assert fresh.decode.generated[0].grammar == Grammar(structure=structure)


def test_text_is_free_by_default(fresh: World) -> None:
    assert fresh.post(response_format={"type": "text"}).status_code == 200
    assert fresh.decode.generated[0].grammar is None


def test_behind_reasoning_the_structure_begins(glm: World) -> None:
    glm.says("well</think>{}")
    glm.chat(QUESTION, tools=openai.omit, response_format={"type": "json_object"})
    assert glm.decode.generated[0].grammar == Grammar(structure=JSON_OBJECT, after="</think>")
    glm.says("{}")
    none = {"reasoning_effort": "none"}
    glm.chat(QUESTION, tools=openai.omit, response_format={"type": "json_object"}, extra_body=none)
    assert glm.decode.generated[0].grammar == Grammar(structure=JSON_OBJECT)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_required_is_a_grammar(deepseek: World, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "clock"}}
    deepseek.says("anything")
    deepseek.chat(QUESTION, tools=[WEATHER, other], tool_choice=choice)
    grammar = deepseek.decode.generated[0].grammar
    assert grammar is not None
    assert isinstance(grammar.structure, Lark)
    assert "weather" in grammar.structure.grammar
    assert ("clock" in grammar.structure.grammar) == (choice == "required")


def test_a_grammar_that_no_node_can_compile_is_the_clients_mistake(fresh: World) -> None:
    fresh.decode.invalid = "json_schema at /properties/a: cannot be compiled"
    answer = fresh.http.post("/v1/completions", json={"prompt": "a", "response_format": {"type": "json_object"}})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (f"response_format: {fresh.decode.invalid}", "response_format")
    assert len(fresh.decode.generated) == 1


def test_the_field_of_a_grammar_is_named_as_the_endpoint_names_it(deepseek: World) -> None:
    deepseek.decode.invalid = "json_schema at /properties/a: cannot be compiled"
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    answer = deepseek.http.post("/v1/responses", json={"input": "a", "text": {"format": form}})
    assert answer.json()["error"]["message"] == f"text.format: {deepseek.decode.invalid}"
    answer = deepseek.http.post(
        "/v1/completions",
        json={"prompt": "a", "structured_outputs": {"regex": "a" * 2**16}},
    )
    assert answer.json()["error"]["param"] == "structured_outputs.regex"
