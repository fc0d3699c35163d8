"""The API's description, /openapi.json: made of the table of endpoints."""

from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter

from base.version import VERSION
from gateway.answers.streamed import StreamedAnswer
from gateway.endpoints import ENDPOINTS, Computes, Endpoint, Generates, Reads, Status
from gateway.errors import AnthropicError, Error, is_anthropic
from service.status import NotReady

Json = dict[str, Any]

_EVENT: Json = {
    "description": "Each event of a stream. data: JSON, or [DONE] at the end. event: its type, where types are named.",
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
    "additionalProperties": False,
}
_GUARDED = {
    401: "The API key is missing or wrong",
    413: "The body is too large",
    429: "The gateway serves as much as it may: try again later",
    500: "Something failed: try again",
}
_FAILURES = {
    400: "Something in the request is wrong; the message names it",
    403: "The client may not go before others (`priority`), or a web page of another origin asks",
    404: "There is no such model",
    415: "The body is not JSON",
    503: "The service cannot take the request now",
    504: "The request took too long",
}


def document() -> Json:
    models: list[type[Any]] = [Error, AnthropicError, NotReady]
    models += [answer for endpoint in ENDPOINTS if (answer := _answer(endpoint)) is not None]
    models += [endpoint.body for endpoint in ENDPOINTS if isinstance(endpoint, Computes | Generates)]
    mode: Literal["validation"] = "validation"
    references, definitions = TypeAdapter.json_schemas(
        [(model.__name__, mode, TypeAdapter(model)) for model in models],
        ref_template="#/components/schemas/{model}",
    )
    schemas: Json = definitions["$defs"]
    for schema in schemas.values():
        # Bodies say that they allow more. Answers have exactly what is declared.
        schema.setdefault("additionalProperties", False)

    def content(model: type[Any]) -> Json:
        return {"application/json": {"schema": dict(references[model.__name__, mode])}}

    def refused(path: str, statuses: dict[int, str]) -> Json:
        error = content(AnthropicError if is_anthropic(path) else Error)
        return {str(status): {"description": text, "content": error} for status, text in statuses.items()}

    def operation(endpoint: Endpoint) -> Json:
        path, answer = endpoint.path, _answer(endpoint)
        text: Json = {"text/plain": {"schema": {"type": "string"}}}
        answered: Json = {
            "description": endpoint.summary if answer is None else answer.__doc__,
            "content": text if answer is None else content(answer),
        }
        responses: Json = {"200": answered}
        names = (part.strip("{}") for part in path.split("/") if part not in ("", "v1"))
        method = "post" if isinstance(endpoint, Computes | Generates) else "get"
        described: Json = {
            "summary": endpoint.summary,
            "operationId": "_".join([method, *names]),
            "responses": responses,
        }
        if not endpoint.needs_key:
            described["security"] = []
        else:
            responses |= refused(path, _GUARDED)
        if isinstance(endpoint, Computes | Generates):
            responses |= refused(path, _FAILURES)
            described["requestBody"] = {"required": True, "content": content(endpoint.body)}
        if isinstance(endpoint, Generates) and issubclass(endpoint.renderer, StreamedAnswer):
            answered["content"]["text/event-stream"] = {"schema": _EVENT}
        if path == "/ready":
            responses["503"] = {"description": NotReady.__doc__, "content": content(NotReady)}
        if "{model}" in path:
            responses |= refused(path, {404: _FAILURES[404]})
            of_path = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            described["parameters"] = [of_path]
        return {method: described}

    return {
        "openapi": "3.1.0",
        "info": {"title": "hisparse-pd", "version": VERSION},
        "paths": {endpoint.path: operation(endpoint) for endpoint in sorted(ENDPOINTS, key=lambda each: each.path)},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # A gateway without keys lets everyone in.
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _answer(endpoint: Endpoint) -> type[Any] | None:
    """The TypedDict of a whole answer; None: text."""
    match endpoint:
        case Status():
            return endpoint.answer
        case Generates():
            hints = get_type_hints(endpoint.renderer.whole)
        case Reads() | Computes():
            hints = get_type_hints(endpoint.render)
    answer: type[Any] = hints["return"]
    return answer
