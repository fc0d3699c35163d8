"""Makes /openapi.json of the models of requests and of answers."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from base.version import VERSION
from gateway.errors import ANTHROPIC_PATH
from gateway.guard import OPEN_PATHS
from gateway.openapi import described
from gateway.openapi.message_answers import MessageAnswered
from gateway.openapi.openai_answers import ChatCompletion, Completion
from gateway.openapi.response_answers import Response
from gateway.requests.body import RequestBody
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest
from gateway.requests.conversion import SAMPLING_FIELDS, ConvertedRequest
from gateway.requests.messages import CountTokensRequest, MessagesRequest
from gateway.requests.responses import ResponsesRequest
from gateway.requests.tokens import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]

_READS: dict[str, tuple[str, type[BaseModel]]] = {
    "/health": ("Whether the process runs", described.HealthAnswer),
    "/ready": ("Whether requests can be served", described.Ready),
    "/version": ("Versions", described.Version),
    "/v1/models": ("The models that are served", described.ModelList),
    "/v1/models/{model}": ("One model", described.ModelCard),
}
_WRITES: dict[str, tuple[str, type[RequestBody], type[BaseModel]]] = {
    "/v1/completions": ("Continue prompts", CompletionRequest, Completion),
    "/v1/chat/completions": ("Answer a conversation", ChatCompletionRequest, ChatCompletion),
    "/v1/responses": ("Answer a conversation, in OpenAI's newer form", ResponsesRequest, Response),
    "/v1/messages": ("Answer a conversation, in Anthropic's form", MessagesRequest, MessageAnswered),
    "/v1/messages/count_tokens": ("Count a conversation's tokens", CountTokensRequest, described.TokenCount),
    "/tokenize": ("Tokens of a text or of a conversation", TokenizeRequest, described.Tokenized),
    "/detokenize": ("Text of tokens", DetokenizeRequest, described.Detokenized),
}
_STREAMS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
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
_GENERATES = {403: "The client may not go before others (`priority`)"}
_FAILURES = {
    400: "Something in the request is wrong; the message names it",
    404: "There is no such model",
    503: "The service cannot take the request now",
    504: "The request took too long",
}


def document() -> Json:
    """The API's description in OpenAPI 3.1."""
    bodies = [body for _, body, _ in _WRITES.values()]
    answers = [model for _, model in _READS.values()] + [answer for _, _, answer in _WRITES.values()]
    errors: list[type[BaseModel]] = [described.Error, described.AnthropicError, described.NotReady]
    models: list[type[BaseModel]] = [*bodies, *answers, *errors]
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas: Json = definitions["$defs"]

    def schema(model: type[BaseModel]) -> Json:
        return dict(references[model, "validation"])

    sampling = schemas[schema(ChatCompletionRequest)["$ref"].rpartition("/")[2]]["properties"]
    for body in bodies:
        if issubclass(body, ConvertedRequest):
            own = schemas[schema(body)["$ref"].rpartition("/")[2]]["properties"]
            own |= {name: sampling[name] for name in SAMPLING_FIELDS if name not in own}

    def refused(path: str, statuses: dict[int, str]) -> Json:
        anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
        error = _content(schema(described.AnthropicError if anthropic else described.Error))
        return {str(status): {"description": text, "content": error} for status, text in statuses.items()}

    def read(path: str, summary: str, answer: type[BaseModel]) -> Json:
        responses: Json = {"200": {"description": answer.__doc__, "content": _content(schema(answer))}}
        operation: Json = {"summary": summary, "operationId": _name("get", path), "responses": responses}
        if path in OPEN_PATHS:
            operation["security"] = []
        else:
            responses |= refused(path, _GUARDED)
        if path == "/ready":
            not_ready = described.NotReady
            responses["503"] = {"description": not_ready.__doc__, "content": _content(schema(not_ready))}
        if "{model}" in path:
            responses |= refused(path, {404: _FAILURES[404]})
            of_path = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [of_path]
        return {"get": operation}

    def write(path: str, summary: str, body: type[RequestBody], answer: type[BaseModel]) -> Json:
        content = _content(schema(answer))
        if path in _STREAMS:
            content["text/event-stream"] = {"schema": _EVENT}
        responses: Json = {"200": {"description": answer.__doc__, "content": content}}
        operation = {
            "summary": summary,
            "operationId": _name("post", path),
            "requestBody": {"required": True, "content": _content(schema(body))},
            "responses": responses
            | refused(path, {**_FAILURES, **_GUARDED, **(_GENERATES if path in _STREAMS else {})}),
        }
        return {"post": operation}

    text = {"description": "Metrics for Prometheus", "content": {"text/plain": {"schema": {"type": "string"}}}}
    metrics = {"summary": "Metrics", "operationId": "get_metrics", "security": [], "responses": {"200": text}}
    paths: Json = {path: read(path, *entry) for path, entry in _READS.items()}
    paths["/metrics"] = {"get": metrics}
    paths |= {path: write(path, *entry) for path, entry in _WRITES.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hisparse-pd", "version": VERSION},
        "paths": dict(sorted(paths.items())),
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


def _content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _name(method: str, path: str) -> str:
    return "_".join([method, *(part.strip("{}") for part in path.split("/") if part not in ("", "v1"))])
