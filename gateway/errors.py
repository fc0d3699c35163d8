"""What a client is told when a request cannot be served."""

from typing import Any

DRAINING = "draining"


class ApiError(Exception):
    """An OpenAI error object with its HTTP status. `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def _type_of(status: int) -> str:
    match status:
        case 429:
            return "rate_limit_error"
        case 503:
            return "service_unavailable_error"
        case 504:
            return "timeout_error"
        case _:
            return "invalid_request_error" if status < 500 else "server_error"


def context_length_exceeded(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def timed_out() -> ApiError:
    return ApiError(504, "the request took longer than this gateway allows", code="timeout")


def draining() -> ApiError:
    """This gateway is about to stop: another one, or its successor, takes the request."""
    return ApiError(503, "the gateway is shutting down", code=DRAINING, retry_after=1.0)


def unavailable(message: str) -> ApiError:
    """The service cannot take the request now and may a moment later."""
    return ApiError(503, message, code="service_unavailable", retry_after=1.0)
