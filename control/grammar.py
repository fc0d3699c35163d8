"""What a request's output must look like: the grammar that travels with it.

A grammar has one of four kinds: a JSON schema, a regular expression, a choice, a Lark or GBNF grammar. The decode node
compiles it (`engine/grammar`). Sizes are bounded here; what a grammar costs to compile is bounded there.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from base.wire import FailFastModel

MAX_TEXT = 2**20
"""Characters of a JSON schema, and of all options of a choice together."""
MAX_LARK = 2**16
"""Characters of one Lark or GBNF grammar."""


class _Model(FailFastModel):
    """Frozen and strict, as all that is in messages, but an unknown field is an error: it may be a constraint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Structure(_Model):
    kind: str

    @model_serializer(mode="wrap")
    def _with_kind(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Messages leave defaults out, but a structure is told by its kind."""
        return {"kind": self.kind, **fields(self)}


class JsonSchema(_Structure):
    """A JSON value that satisfies a schema (draft 2020-12). schema_text: the schema as JSON."""

    kind: Literal["json_schema"] = "json_schema"
    schema_text: Annotated[str, Field(max_length=MAX_TEXT)]


class Regex(_Structure):
    """Text that matches a regular expression as a whole. No look-around, no back references."""

    kind: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(max_length=2**15)]


class TextChoice(_Structure):
    """One of some texts."""

    kind: Literal["choice"] = "choice"
    options: Annotated[tuple[Annotated[str, Field(max_length=2**14)], ...], Field(min_length=1, max_length=10_000)]

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if (size := sum(map(len, self.options))) > MAX_TEXT:
            raise ValueError(f"the options have {size} characters; together they may have {MAX_TEXT}")
        return self


class Lark(_Structure):
    """Text of a context-free grammar: llguidance's dialect of Lark, or GBNF (recognised by its `::=`)."""

    kind: Literal["lark"] = "lark"
    grammar: Annotated[str, Field(max_length=MAX_LARK)]


Structure = JsonSchema | Regex | TextChoice | Lark


class Grammar(_Model):
    """What a request generates. after: the text after which the structure begins (the end of reasoning, as
    `</think>`); text before is free. None: it begins with the first token."""

    structure: Annotated[Structure, Field(discriminator="kind")]
    after: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


JSON_OBJECT = JsonSchema(schema_text='{"type": "object"}')
"""Any JSON object: OpenAI's `json_object`."""
