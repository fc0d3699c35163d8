"""Errors that clients are told, as OpenAI's error objects or, where its API is spoken, as Anthropic's."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

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


class AnthropicErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str


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
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> Error:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> AnthropicError:
        kind = _ANTHROPIC_TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> Response:
        """path: of the request, which decides the form."""
        headers = {}
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
    """Whether errors at a path have the form of Anthropic's."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def shown(value: object) -> str:
    """The value as an error message shows it: its beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def context_length_exceeded(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def timed_out() -> ApiError:
    return ApiError(504, "the request took longer than this gateway allows", code="timeout")


def unavailable(message: str) -> ApiError:
    """The service cannot take the request now, but may a moment later."""
    return ApiError(503, message, code="service_unavailable", retry_after=1.0)
