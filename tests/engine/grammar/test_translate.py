"""Every kind of grammar allows what it says and nothing else."""

from typing import Any

import pytest

from control.grammar import JSON_OBJECT, JsonSchema, Lark, Regex, Structure, TextChoice
from engine.grammar import GrammarError
from gateway.formats.tools import CallRules, ToolSet
from tests.engine.grammar.small import (
    END_OF_THINKING,
    TOOL_CALL,
    accepts,
    allowed,
    compiled,
    encode,
    id_of,
)
from tests.gateway.formats.examples import parsing_format


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (
            JSON_OBJECT,
            ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": "☃ \\n"\n}'],
            ["", "[]", "{", ' {"a": 1}', '{"a": 1} '],
        ),
        (JsonSchema(schema_text="true"), ["1", '"a"'], ["a", ""]),
        (JsonSchema(schema_text='{"type": "integer", "minimum": 3}'), ["3", "12"], ["2", "-1", "3.5"]),
        (JsonSchema(schema_text='{"type": "string", "format": "password"}'), ['"x"'], ["x"]),
        (
            JsonSchema(schema_text='{"items": {"type": "null", "format": ["uri"]}, "type": "array"}'),
            ["[null]"],
            ["[1]"],
        ),
        (JsonSchema(schema_text='{"x-guidance": {"lenient": true}, "type": "null"}'), ["null"], ["0"]),
        (Regex(pattern=r"(\d{4})-\d\d/x|\n"), ["2024-01/x", "\n"], ["2024-01", "2024-1/x", "a2024-01/x"]),
        (Regex(pattern="^a+$"), ["aa"], ["", "ab"]),
        (
            TextChoice(options=("yes", "no", "yes and no", 'a "b"\n', "a/\\b")),
            ["yes", "yes and no", 'a "b"\n', "a/\\b"],
            ["y", "yes and", "yesno", "a/"],
        ),
        (TextChoice(options=("", TOOL_CALL, "a")), ["", TOOL_CALL, "a"], ["b", TOOL_CALL * 2]),
        (TextChoice(options=tuple(str(n) * 8 for n in range(5000))), ["0" * 8, "4999" * 8], ["1", "5000" * 8]),
        (Lark(grammar='start: e\ne: "(" e ")" | "x"'), ["x", "((x))"], ["(x", ""]),
        (Lark(grammar='start: %json {"type": "string", "format": "binary"}'), ['"a"'], ["a"]),
        (Lark(grammar='root ::= "a" b*\nb ::= [0-9]'), ["a", "a12"], ["1", "ab"]),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_a_grammar_allows_its_texts(structure: Structure, good: list[str], bad: list[str]) -> None:
    grammar = compiled(structure)
    assert [text for text in good if not accepts(grammar.start(), text)] == []
    assert [text for text in bad if accepts(grammar.start(), text)] == []


def test_an_added_token_is_not_the_letters_that_spell_it() -> None:
    assert allowed(compiled(TextChoice(options=(TOOL_CALL,))).start()) == {id_of(TOOL_CALL)}
    inside = compiled(JSON_OBJECT).start()
    for token_id in encode('{"a": "b'):
        inside.advance(token_id)
    assert allowed(inside).isdisjoint({id_of(TOOL_CALL), id_of(END_OF_THINKING), id_of("<bos>"), id_of("<eos>")})
    assert accepts(compiled(Lark(grammar="start: <tool_call>")).start(), TOOL_CALL)


def test_a_marker_ends_free_text_as_a_token_and_spelled_out() -> None:
    grammar = compiled(TextChoice(options=("A", "B")), after=f"\n{END_OF_THINKING}")
    assert accepts(grammar.start(), f"A and B, well\n{END_OF_THINKING}A")
    state = grammar.start()
    for token_id in [*encode("hm\n"), *encode("</thi"), *encode("nk"), *encode(">")]:
        state.advance(token_id)
    assert accepts(state, "B")
    assert not accepts(grammar.start(), f"hm\n{END_OF_THINKING}C")
    assert not accepts(grammar.start(), "A")


def test_free_text_ends_with_the_first_occurrence_of_a_plain_marker() -> None:
    grammar = compiled(TextChoice(options=("A", "")), after="END")
    texts = ["END", "ENDA", "some \n EN ENDA", "some", "END more", "aENDbEND"]
    assert [text for text in texts if accepts(grammar.start(), text)] == texts[:3]


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (JsonSchema(schema_text="{"), "json_schema: the JSON schema is not JSON"),
        (JsonSchema(schema_text='{"const": NaN}'), "NaN is not JSON"),
        (JsonSchema(schema_text="[]"), r"an object or true, found \[\]"),
        (JsonSchema(schema_text='{"items":' * 80 + "{}" + "}" * 80), "nested more than 64 deep at /items/items"),
        (
            JsonSchema(schema_text='{"properties": {"a/b": {"items": {"not": {}}}}}'),
            r'json_schema at /properties/a~1b/items: Unimplemented keys: \["not"\]',
        ),
        (
            JsonSchema(
                schema_text='{"$defs": {"x": {"uniqueItems": true}}, "properties": {"a": {"$ref": "#/$defs/x"}}}'
            ),
            r"at /\$defs/x: Unimplemented keys",
        ),
        (
            JsonSchema(schema_text=f'{{"items": {{"maximum": {10**30}, "type": "foo"}}}}'),
            "json_schema at /items: Invalid type: foo",
        ),
        (JsonSchema(schema_text='{"$ref": "http://example.com/s"}'), "Default retriever does not fetch"),
        (Regex(pattern="(?=a)"), "regex: .*look-around"),
        (Regex(pattern="(a"), "regex: invalid regex .*unclosed group"),
        (Lark(grammar="start: a"), 'lark: .*unknown name: "a"'),
        (Lark(grammar="root ::= ("), "lark: the GBNF grammar cannot be read"),
        (Lark(grammar="root ::= x"), "lark: the GBNF grammar cannot be read: Rule 'x' not found"),
        (Lark(grammar='start: a b\na: "x"\nb: %json {"items": {"type": "foo"}}'), "lark at /items: Invalid type: foo"),
        (
            Lark(grammar="start: %json " + '{"items":' * 80 + "{}" + "}" * 80),
            "nested more than 64 deep at /items/items",
        ),
    ],
)
def test_an_error_names_the_part(structure: Structure, message: str) -> None:
    for after in (None, END_OF_THINKING):
        with pytest.raises(GrammarError, match=message):
            compiled(structure, after)


@pytest.mark.parametrize("family", ["dsml", "glm", "hermes"])
@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        (
            {"properties": {"a/b": {"items": {"type": "foo"}, "type": "array"}}},
            "f at /properties/a~1b/items: Invalid type",
        ),
        (
            {"properties": {"n": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "array", "uniqueItems": True}}},
            r"f at /\$defs/d: Unimpl",
        ),
    ],
)
def test_an_error_in_a_tool_names_it_and_the_place(family: str, parameters: dict[str, Any], place: str) -> None:
    tools = ToolSet([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    grammar = parsing_format(family).call_grammar(CallRules(tools, forced=True))
    assert grammar is not None
    with pytest.raises(GrammarError, match=f"^{place}"):
        compiled(Lark(grammar=grammar))
