"""What the text of an answer has to look like: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from base.wire import first_error
from control.grammar import JSON_OBJECT, JsonSchema, Lark, Regex, Structure, TextChoice
from gateway.errors import ApiError, wrong
from gateway.requests.body import JsonObject, JsonOrText, Piece


class NamedSchema(Piece):
    """strict: schemas are always followed."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Piece):
    """OpenAI's `response_format`. json_schema: of that type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise PydanticCustomError("schema", "expected json_schema.schema for the type json_schema")
        return self


class StructuredOutputs(Piece):
    """vLLM's `structured_outputs`: one of these."""

    json_: Annotated[JsonOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructureFields(Piece):
    """The fields of a body that say what the text has to look like, those of older versions of vLLM included."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonOrText | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None

    def structure(self) -> tuple[str, Structure] | None:
        """What the text has to look like, and the field that says so; None: anything.

        Raises ApiError if there are two answers to that.
        """
        given = self._structures()
        if len(given) > 1:
            raise ApiError(400, f"{' and '.join(given)}: expected one of them", param=next(iter(given)))
        for name, (kind, value) in given.items():
            try:
                return name, JSON_OBJECT if kind == "json_object" else _MAKERS[kind](value)
            except ValidationError as error:
                raise wrong(name, first_error(error)["msg"]) from error
        return None

    def _structures(self) -> dict[str, tuple[str, Any]]:
        """By field that is given, the kind of structure and what it is made of."""
        form, outputs = self.response_format, self.structured_outputs or StructuredOutputs()
        schema = form.json_schema.schema_ if form and form.type == "json_schema" and form.json_schema else None
        given = {
            "response_format": ("json_object", True) if form and form.type == "json_object" else ("json", schema),
            "structured_outputs.json": ("json", outputs.json_),
            **{f"structured_outputs.{kind}": (kind, getattr(outputs, kind)) for kind in _MAKERS if kind != "json"},
            "structured_outputs.json_object": ("json_object", outputs.json_object or None),
            **{f"guided_{kind}": (kind, getattr(self, f"guided_{kind}")) for kind in _MAKERS},
        }
        return {name: (kind, value) for name, (kind, value) in given.items() if value is not None}


def _schema(schema: dict[str, Any] | str) -> Structure:
    return JsonSchema(schema_text=schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


_MAKERS: dict[str, Callable[[Any], Structure]] = {
    "json": _schema,
    "regex": lambda pattern: Regex(pattern=pattern),
    "choice": lambda options: TextChoice(options=tuple(options)),
    "grammar": lambda text: Lark(grammar=text),
}
