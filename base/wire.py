"""Pieces of messages: frozen models that refuse values of a wrong type."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails

UInt = Annotated[int, Field(ge=0, lt=2**63)]
Identifier = Annotated[str, Field(min_length=1, max_length=128)]


def _set_fail_fast(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _set_fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _set_fail_fast(part)


class FailFastModel(BaseModel):
    """A model whose lists and objects are validated up to their first error.

    pydantic otherwise keeps one error per element: a list of a million wrong elements takes seconds and a gigabyte.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _set_fail_fast(schema)
        return schema


MAX_ERRORS = 100
"""Of one validation. More are counted, and not built: each takes microseconds and a kilobyte."""


def first_error(error: ValidationError) -> ErrorDetails:
    """The first error of a validation, or one that says how many there are if there are more than MAX_ERRORS."""
    if (count := error.error_count()) > MAX_ERRORS:
        return {"type": "too_many_errors", "loc": (), "msg": f"{count} values are not as expected", "input": None}
    return error.errors(include_url=False)[0]


class WireModel(FailFastModel):
    """A frozen piece of a message. A value of the wrong type is an error and is not converted."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)
