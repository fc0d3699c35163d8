"""Errors that clients are told, as OpenAI's error objects or, where its API is spoken, as Anthropic's."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NotRequired

from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

ANTHROPIC_PATH = "/v1/messages"
"""Errors at this path and below it are Anthropic's."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


class ErrorDetail(TypedDict):
    """param: the field that is wrong, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """An error, as OpenAI's API writes it."""

    error: ErrorDetail


class AnthropicErrorCode(TypedDict):
    """By which clients tell errors of one type apart."""

    error_code: str


class AnthropicErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str
    details: NotRequired[AnthropicErrorCode]


class AnthropicError(TypedDict):
    """An error, as Anthropic's API writes it."""

    type: Literal["error"]
    error: AnthropicErrorDetail


@dataclass(eq=False)
class ApiError(Exception):
    """An error with its HTTP status. `retry_after` is in seconds."""

    status: int
    message: str
    _: KW_ONLY
    anthropic: str | None = None
    """The message in the words that clients of Anthropic's API know."""
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> Error:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> AnthropicError:
        kind = _ANTHROPIC_TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
        detail: AnthropicErrorDetail = {"type": kind, "message": self.anthropic or self.message}
        if self.code is not None:
            detail["details"] = {"error_code": self.code}
        return {"type": "error", "error": detail}

    def response(self, path: str = "") -> Response:
        """path: of the request, which decides the form."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.code == "draining":
            # A new connection leads the client's next attempt to a gateway that serves.
            headers["Connection"] = "close"
        body = self.anthropic_body() if is_anthropic(path) else self.body()
        return JSONResponse(body, status_code=self.status, headers=headers)


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def shown(value: object) -> str:
    """The value as an error message shows it: its beginning, if it is long."""
    return brief(repr(value))


def brief(text: str) -> str:
    """The text, or its beginning if it is long."""
    return text if len(text) <= 80 else text[:77] + "..."


def wrong(field: str, reason: str) -> ApiError:
    """A field of the body cannot be carried out as it is."""
    return ApiError(400, f"{field}: {reason}", param=field)


def context_length_exceeded(limit: str, however: str, anthropic: str, param: str | None = None) -> ApiError:
    """By these words of OpenAI's and Anthropic's APIs, agents know that a shorter prompt would do."""
    message = f"This model's maximum context length is {limit}. However, {however}"
    return ApiError(400, message, anthropic=anthropic, param=param, code="context_length_exceeded")


def timed_out() -> ApiError:
    return ApiError(504, "the request took longer than this gateway allows", code="timeout")


def unavailable(message: str) -> ApiError:
    """The service cannot take the request now, but may a moment later."""
    return ApiError(503, message, code="service_unavailable", retry_after=1.0)
