"""What the text of an answer has to look like: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from base.wire import first_error
from control.grammar import JSON_OBJECT, JsonSchema, Lark, Regex, Structure, TextChoice
from gateway.errors import ApiError
from gateway.requests.body import JsonObject, Piece


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

    json_: Annotated[JsonObject | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructureFields(Piece):
    """The fields of a body that say what the text has to look like, those of older versions of vLLM included."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None

    def structure(self) -> Structure | None:
        """What the text has to look like; None: anything. Raises ApiError if there are two answers to that."""
        try:
            wanted = {name: made for name, made in self._structures().items() if made is not None}
        except ValidationError as error:
            message = f"the structure of the answer cannot be used: {first_error(error)['msg']}"
            raise ApiError(400, message) from error
        if len(wanted) > 1:
            raise ApiError(400, f"{' and '.join(wanted)}: expected one of them", param=next(iter(wanted)))
        return next(iter(wanted.values()), None)

    def _structures(self) -> dict[str, Structure | None]:
        form, outputs = self.response_format, self.structured_outputs or StructuredOutputs()
        schema = form.json_schema.schema_ if form and form.type == "json_schema" and form.json_schema else None
        return {
            "response_format": JSON_OBJECT if form and form.type == "json_object" else _made("json", schema),
            "structured_outputs.json": _made("json", outputs.json_),
            **{f"structured_outputs.{kind}": _made(kind, getattr(outputs, kind)) for kind in _MAKERS if kind != "json"},
            "structured_outputs.json_object": JSON_OBJECT if outputs.json_object else None,
            **{f"guided_{kind}": _made(kind, getattr(self, f"guided_{kind}")) for kind in _MAKERS},
        }


def _schema(schema: dict[str, Any] | str) -> Structure:
    return JsonSchema(schema_text=schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


_MAKERS: dict[str, Callable[[Any], Structure]] = {
    "json": _schema,
    "regex": lambda pattern: Regex(pattern=pattern),
    "choice": lambda options: TextChoice(options=tuple(options)),
    "grammar": lambda text: Lark(grammar=text),
}


def _made(kind: str, value: Any) -> Structure | None:
    return None if value is None else _MAKERS[kind](value)
