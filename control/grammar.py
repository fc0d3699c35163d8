"""What a request's output must look like: the grammar that travels with it.

A grammar is a tree. Its leaves are what clients send (a JSON schema, a regular expression, a choice, a Lark or GBNF
grammar) and literal text; its inner nodes combine them, so that a chat format can be written down exactly. The decode
node compiles it (`engine/grammar`). Sizes are bounded here; what a grammar costs to compile is bounded there.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from base.wire import FailFastModel

MAX_TEXT = 2**20
"""Characters of all strings of a grammar together."""
MAX_LARK = 2**16
"""Characters of one Lark or GBNF grammar."""
MAX_NODES = 2048
MAX_DEPTH = 16
Short = Annotated[str, Field(max_length=1024)]


class _Model(FailFastModel):
    """Frozen and strict, as all that is in messages, but an unknown field is an error: it may be a constraint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_serializer(mode="wrap")
    def _with_kind(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Messages leave defaults out, but a node is told by its kind."""
        kind = {"kind": self.kind} if hasattr(self, "kind") else {}
        return {**kind, **fields(self)}


class JsonSchema(_Model):
    """A JSON value that satisfies a schema (draft 2020-12). schema_text: the schema as JSON."""

    kind: Literal["json_schema"] = "json_schema"
    schema_text: Annotated[str, Field(max_length=MAX_TEXT)]


class Regex(_Model):
    """Text that matches a regular expression as a whole. No look-around, no back references."""

    kind: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(max_length=2**15)]


class TextChoice(_Model):
    """One of some texts."""

    kind: Literal["choice"] = "choice"
    options: Annotated[tuple[Annotated[str, Field(max_length=2**14)], ...], Field(min_length=1, max_length=10_000)]


class Lark(_Model):
    """Text of a context-free grammar: llguidance's dialect of Lark, or GBNF (recognised by its `::=`)."""

    kind: Literal["lark"] = "lark"
    grammar: Annotated[str, Field(max_length=MAX_LARK)]


class Text(_Model):
    """Exactly this text. Where it contains an added token of the tokenizer, as `<tool_call>`, that token is meant."""

    kind: Literal["text"] = "text"
    text: Short


class Until(_Model):
    """Any text up to and with the first occurrence of `end`, spelled out or as added tokens."""

    kind: Literal["until"] = "until"
    end: Annotated[str, Field(min_length=1, max_length=1024)]


class Sequence(_Model):
    """All items, one after the other."""

    kind: Literal["sequence"] = "sequence"
    items: tuple["Node", ...]


class Either(_Model):
    """One of the items."""

    kind: Literal["either"] = "either"
    items: Annotated[tuple["Node", ...], Field(min_length=1)]


class Repeat(_Model):
    """The item, at least `least` and at most `most` times; most None: any number of times."""

    kind: Literal["repeat"] = "repeat"
    item: "Node"
    least: Annotated[int, Field(ge=0, le=1024)] = 0
    most: Annotated[int, Field(ge=1, le=1024)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.most is not None and self.most < self.least:
            raise ValueError(f"most {self.most} is less than least {self.least}")
        return self


class Tag(_Model):
    """A part of `Tags`: `begin`, the content, `end`."""

    begin: Annotated[str, Field(min_length=1, max_length=1024)]
    content: "Node"
    end: Short = ""


class Tags(_Model):
    """Free text in which certain parts are constrained: tool calls that the model may make (vLLM's structural tags).

    Text is free until a trigger, with which the `begin` of one or more tags starts. From there on it is one of these
    tags, and after that free again. at_least_one: the text does not end without a tag. stop_after_first: it ends after
    the first.
    """

    kind: Literal["tags"] = "tags"
    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    triggers: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...], Field(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False

    @model_validator(mode="after")
    def _triggered(self) -> Self:
        for tag in self.tags:
            if not any(tag.begin.startswith(trigger) for trigger in self.triggers):
                raise ValueError(f"tag {tag.begin!r} begins with none of the triggers {list(self.triggers)}")
        return self


Leaf = JsonSchema | Regex | TextChoice | Lark
Node = Annotated[
    JsonSchema | Regex | TextChoice | Lark | Text | Until | Sequence | Either | Repeat | Tags,
    Field(discriminator="kind"),
]


class Grammar(_Model):
    """What a request generates. after: the text after which the grammar begins (the end of reasoning, as `</think>`);
    text before is free. None: it begins with the first token."""

    root: Node
    after: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        size = 0
        for nodes, (node, depth) in enumerate(_walk(self.root, 1), start=1):
            size += sum(_characters(value) for name, value in node if name != "kind")
            if depth > MAX_DEPTH:
                raise ValueError(f"the grammar is nested more than {MAX_DEPTH} deep")
            if nodes > MAX_NODES:
                raise ValueError(f"the grammar has more than {MAX_NODES} parts")
            if size > MAX_TEXT:
                raise ValueError(f"the grammar has more than {MAX_TEXT} characters")
        return self


for _model in (Sequence, Either, Repeat, Tag, Tags, Grammar):
    _model.model_rebuild()

JSON_OBJECT = JsonSchema(schema_text='{"type": "object"}')
"""Any JSON object: OpenAI's `json_object`."""


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly below one."""
    match node:
        case Sequence() | Either():
            return node.items
        case Repeat():
            return (node.item,)
        case Tags():
            return tuple(tag.content for tag in node.tags)
    return ()


def _walk(node: Node, depth: int) -> Iterator[tuple[Node, int]]:
    yield node, depth
    for child in children(node):
        yield from _walk(child, depth + 1)


def _characters(value: object) -> int:
    """Characters of the strings in a field's value, without nodes below."""
    match value:
        case str():
            return len(value)
        case tuple():
            return sum(map(_characters, value))
        case Tag():
            return len(value.begin) + len(value.end)
    return 0
