"""What may travel as a grammar."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from control.grammar import (
    JSON_OBJECT,
    MAX_TEXT,
    Grammar,
    Lark,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Tags,
    Text,
    TextChoice,
    Until,
)

TREE = Grammar(
    root=Sequence(
        items=(
            Text(text="a"),
            Repeat(item=Regex(pattern="b+"), least=1),
            Until(end="."),
            Tags(tags=(Tag(begin="<call>", content=JSON_OBJECT, end="</call>"),), triggers=("<",)),
            Lark(grammar='start: "x"'),
            TextChoice(options=("yes", "no")),
        )
    ),
    after="</think>",
)


def test_a_tree_comes_out_of_json_as_it_went_in() -> None:
    assert Grammar.model_validate_json(TREE.model_dump_json()) == TREE
    assert hash(TREE) == hash(Grammar.model_validate_json(TREE.model_dump_json()))


def nested(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"kind": "text", "text": "a"}
    for _ in range(depth):
        node = {"kind": "repeat", "item": node}
    return {"root": node}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nested(16), "nested more than 16 deep"),
        (nested(150), "[Rr]ecursion|nested more"),
        ({"root": {"kind": "sequence", "items": [{"kind": "text", "text": ""}] * 2048}}, "more than 2048 parts"),
        ({"root": {"kind": "choice", "options": ["a" * 2**14] * 65}}, f"more than {MAX_TEXT} characters"),
        ({"root": {"kind": "choice", "options": []}}, "at least 1 item"),
        ({"root": {"kind": "regex", "pattern": "a" * (2**15 + 1)}}, "at most 32768 characters"),
        ({"root": {"kind": "regex", "pattern": "a", "flags": "i"}}, "Extra inputs"),
        ({"root": {"kind": "repeat", "item": {"kind": "text", "text": "a"}, "least": 3, "most": 2}}, "less than least"),
        (
            {
                "root": {
                    "kind": "tags",
                    "triggers": ["x"],
                    "tags": [{"begin": "a", "content": {"kind": "text", "text": ""}}],
                }
            },
            "begins with none of the triggers",
        ),
    ],
)
def test_what_is_too_large_or_makes_no_sense_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Grammar.model_validate_json(json.dumps(content))
