"""What may travel as a grammar."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from control.grammar import JSON_OBJECT, MAX_TEXT, Grammar, Lark, Regex, Structure, TextChoice


@pytest.mark.parametrize(
    "structure", [JSON_OBJECT, Regex(pattern="b+"), TextChoice(options=("yes", "no")), Lark(grammar='start: "x"')]
)
def test_a_grammar_comes_out_of_a_message_as_it_went_in(structure: Structure) -> None:
    grammar = Grammar(structure=structure, after="</think>")
    assert Grammar.model_validate(grammar.model_dump(exclude_defaults=True)) == grammar
    assert Grammar.model_validate_json(grammar.model_dump_json()) == grammar
    assert hash(grammar) == hash(Grammar.model_validate_json(grammar.model_dump_json()))


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"kind": "choice", "options": ["a" * 2**14] * 65}, f"together they may have {MAX_TEXT}"),
        ({"kind": "choice", "options": []}, "at least 1 item"),
        ({"kind": "regex", "pattern": "a" * (2**15 + 1)}, "at most 32768 characters"),
        ({"kind": "regex", "pattern": "a", "flags": "i"}, "Extra inputs"),
        ({"kind": "text", "text": "a"}, "expected tags: 'json_schema', 'regex', 'choice', 'lark'"),
    ],
)
def test_what_is_too_large_or_makes_no_sense_is_refused(structure: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Grammar.model_validate_json(json.dumps({"structure": structure}))
