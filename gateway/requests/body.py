"""How request bodies are read: JSON into pydantic models, and errors that name the field.

Types are strict: neither "5" nor true is an integer. As in OpenAI's API, null means the default. Fields that are not
declared are for `gateway.requests.unsupported`.
"""

import json
from abc import ABC, abstractmethod
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Discriminator, Tag, ValidationError
from pydantic_core import PydanticCustomError

from base.wire import FailFastModel, first_error
from gateway.errors import ApiError, shown
from gateway.requests.unsupported import FieldPolicy

OTHER_KIND = "other_kind"
"""The type of the error of an element whose `type` is not one of those expected."""


class Piece(FailFastModel):
    """A piece of a body."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class RequestBody(Piece, ABC):
    """The body of a request."""

    @abstractmethod
    def check_fields(self, policy: FieldPolicy) -> None:
        """Raises ApiError for a field that asks for what is not carried out."""


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """The value. Numbers such as 1e999 and NaN are read as Python's, which no answer can repeat."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise PydanticCustomError("finite", "expected JSON with finite numbers, not nested too deeply") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""An object of which nothing more is known, such as a JSON schema."""

_T = TypeVar("_T")


TEXT_OR_OTHER = Discriminator(lambda value: "<text>" if isinstance(value, str) else "<other>")
"""Tells a string, which is tagged `<text>`, from anything else, which is tagged `<other>`."""
TextOr = Annotated[Annotated[str, Tag("<text>")] | Annotated[list[_T], Tag("<other>")], TEXT_OR_OTHER]
"""Text, or a list of pieces."""


def kinds(expected: str, default: str | None = None) -> Discriminator:
    """Tells the members of a union apart, which are tagged `<type>`. expected: for the error of another type."""

    def kind(value: object) -> str | None:
        found = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{found}>"

    return Discriminator(kind, custom_error_type=OTHER_KIND, custom_error_message=f"expected {expected}")


_Body = TypeVar("_Body", bound=RequestBody)


def parse(kind: type[_Body], body: bytes, policy: FieldPolicy) -> _Body:
    """A validated request. Raises ApiError (400) that names the field, what was expected and what was found."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from error
    request.check_fields(policy)
    return request


def invalid(error: ValidationError) -> ApiError:
    """The first error of a validation, as clients are told."""
    first = first_error(error)
    # Tags of unions are no part of a field's name.
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith("<"))
    found = first["input"]
    message = f"{field}: {first['msg']}" if field else first["msg"]
    if first["type"] == OTHER_KIND and isinstance(found, dict) and "type" in found:
        message += f", found one of type {shown(found['type'])}"
    elif field and first["type"] != "missing":
        message += f", found {shown(found)}"
    return ApiError(400, message, param=field or None)
