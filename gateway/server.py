"""The HTTP routes of OpenAI's, Anthropic's and vLLM's APIs, and error responses."""

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.answers.chat import ChatAnswer
from gateway.answers.completions import CompletionAnswer
from gateway.answers.messages import MessageAnswer
from gateway.answers.responses import ResponseAnswer
from gateway.answers.streamed import StreamedAnswer
from gateway.attempt import Shortcut
from gateway.completer import Completer
from gateway.errors import ApiError
from gateway.guard import RequestBytes
from gateway.openapi.document import document
from gateway.prepared import ApiRequest
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest
from gateway.requests.conversion import ConvertedRequest
from gateway.requests.messages import CountTokensRequest, MessagesRequest
from gateway.requests.responses import ResponsesRequest
from gateway.requests.tokens import DetokenizeRequest, TokenizeRequest
from gateway.streaming import CLIENT_LEFT, EventStream, WholeAnswer, unless_client_leaves
from gateway.tokenizing import Tokenizing

_RequestKind = type[ApiRequest] | type[ConvertedRequest]
_GENERATES: dict[str, tuple[_RequestKind, type[StreamedAnswer]]] = {
    "/v1/completions": (CompletionRequest, CompletionAnswer),
    "/v1/chat/completions": (ChatCompletionRequest, ChatAnswer),
    "/v1/responses": (ResponsesRequest, ResponseAnswer),
    "/v1/messages": (MessagesRequest, MessageAnswer),
}
"""By path, what the body is and how the answer is written."""


class ApiServer:
    """Answers the API's routes. `refusal` returns why no request can be taken now, or None."""

    def __init__(self, completer: Completer, refusal: Callable[[], ApiError | None]) -> None:
        self._completer = completer
        self._tokenizing = Tokenizing(completer)
        self._refusal = refusal
        self._created = int(time.time())
        self._document = document()

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        for error in (ApiError, HTTPException, ClientDisconnect, Exception):
            app.add_exception_handler(error, _error_response)
        app.add_api_route("/openapi.json", self._openapi, methods=["GET"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/v1/models/{model:path}", self._one_model, methods=["GET"])
        for path in _GENERATES:
            app.add_api_route(path, self._answer, methods=["POST"])
        app.add_api_route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"])
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self._detokenize, methods=["POST"])
        return app

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, request: Request, model: str) -> Response:
        self._completer.check_model(model)
        return JSONResponse(self._model_card())

    async def _count_tokens(self, request: Request) -> Response:
        return await self._completer.read(await request.body(), CountTokensRequest, self._tokenizing.count)

    async def _tokenize(self, request: Request) -> Response:
        return await self._completer.read(await request.body(), TokenizeRequest, self._tokenizing.tokenize)

    async def _detokenize(self, request: Request) -> Response:
        return await self._completer.read(await request.body(), DetokenizeRequest, self._tokenizing.detokenize)

    async def _answer(self, http: Request) -> Response:
        kind, answer_kind = _GENERATES[http.url.path]
        work = self._generate(await http.body(), kind, answer_kind, http.scope["counted"], http.scope["client_key"])
        return await unless_client_leaves(http, work)

    async def _generate(
        self,
        body: bytes,
        kind: _RequestKind,
        answer_kind: type[StreamedAnswer],
        counted: RequestBytes,
        client_key: bytes,
    ) -> Response:
        """The complete answer, or a stream once it has its first tokens: until then an error has an HTTP status."""
        prepared = await self._completer.prepare(body, kind, client_key)
        request = prepared.request
        counted.prompt(prepared.prompt_tokens)
        if refusal := self._refusal():
            raise refusal
        held = counted.answers
        answer = answer_kind(prepared, self._completer.model, self._completer.tokenizer, held)
        if not request.stream:
            body = await self._completer.whole(prepared, answer, held)
            return WholeAnswer(body, prepared.request_id, held)
        shortcut = Shortcut()
        deltas = self._completer.deltas(prepared, held, shortcut)
        return EventStream(answer, prepared.request_id, await anext(deltas), deltas, shortcut)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._completer.model,
            "object": "model",
            "created": self._created,
            "owned_by": "hisparse-pd",
            "max_model_len": self._completer.capacity.context,
        }


async def _error_response(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            told = error
        case HTTPException():
            told = ApiError(error.status_code, f"{request.url.path}: {error.detail}")
        case ClientDisconnect():
            # In the middle of its body: nobody reads this answer.
            return Response(status_code=CLIENT_LEFT)
        case _:
            # Starlette logs the traceback after this answer.
            told = ApiError(500, "internal error")
    return told.response(request.url.path)
