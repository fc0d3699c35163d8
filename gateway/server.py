"""The HTTP routes of OpenAI's, Anthropic's and vLLM's APIs, and error responses."""

import asyncio
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import WebSocketRoute
from starlette.types import Scope

from gateway.admission import RequestBytes
from gateway.answers.streamed import StreamedAnswer, encode_json
from gateway.attempt import DeltaSink
from gateway.completer import Completer
from gateway.endpoints import ENDPOINTS, Computes, Generates, Reads
from gateway.errors import ApiError
from gateway.openapi import document
from gateway.streaming import CLIENT_LEFT, EventStream, WholeAnswer, unless_client_leaves
from gateway.websocket import OpenSockets, Turn


class ApiServer:
    """Answers the API's routes. `rejection_reason` returns why no request can be taken now, or None."""

    def __init__(
        self, completer: Completer, rejection_reason: Callable[[], ApiError | None], sockets: OpenSockets
    ) -> None:
        self._completer = completer
        self._rejection_reason = rejection_reason
        self._sockets = sockets

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        for error in (ApiError, HTTPException, ClientDisconnect, Exception):
            app.add_exception_handler(error, _error_response)
        description = JSONResponse(document())

        @app.get("/openapi.json")
        async def openapi() -> Response:
            return description

        for endpoint in ENDPOINTS:
            path = endpoint.path.replace("}", ":path}")
            match endpoint:
                case Reads():
                    app.add_api_route(path, partial(self._read, endpoint), methods=["GET"])
                case Computes():
                    app.add_api_route(path, partial(self._compute, endpoint), methods=["POST"])
                case Generates():
                    app.add_api_route(path, partial(self._answer, endpoint), methods=["POST"])
                    if endpoint.message is not None:
                        app.router.routes.append(WebSocketRoute(path, self._sockets.serve))
        return app

    async def _read(self, endpoint: Reads, http: Request) -> Response:
        return JSONResponse(endpoint.render(self._completer, **http.path_params))

    async def _compute(self, endpoint: Computes, http: Request) -> Response:
        completer, render, held = self._completer, endpoint.render, http.scope["counted"].answers
        body = await http.body()
        answer = await completer.read(body, endpoint.body, lambda parsed: encode_json(render(parsed, completer)))
        held.take(len(answer))
        return WholeAnswer(answer, http.scope["access"].http_request_id, held)

    async def _answer(self, endpoint: Generates, http: Request) -> Response:
        work = self._generate(endpoint, await http.body(), http.scope)
        return await unless_client_leaves(http.receive, work) or Response(status_code=CLIENT_LEFT)

    async def _generate(self, endpoint: Generates, body: bytes, scope: Scope) -> Response:
        """The complete answer, or a stream once it has its first tokens: until then an error has an HTTP status."""
        completer, client = self._completer, scope["sender"]
        counted: RequestBytes = scope["counted"]
        held, access = counted.answers, scope["access"]
        access.span.record("receive", access.started)
        turn: Turn | None = scope.get("turn")
        if turn is not None and endpoint.message is not None:
            body = await completer.read(body, endpoint.message, turn.body)
            counted.arrived(len(body))
        prepared = await completer.prepare(body, endpoint.body, endpoint.id_prefix, client, access.span)
        access.prepared = prepared
        if turn is not None:
            turn.response_id = prepared.request_id
        if reason := self._rejection_reason():
            raise reason
        counted.prompt(prepared.prompt_tokens)
        scope["usage"].prompt(client, prepared.prompt_tokens)
        renderer = partial(endpoint.renderer, prepared, completer.model, completer.tokenizer, held)
        # Prompts of token ids that are repeated are decoded, which may take long.
        answer = await asyncio.to_thread(renderer) if getattr(prepared.request, "echo", None) else renderer()
        if not prepared.request.stream:
            return WholeAnswer(await completer.whole(prepared, answer, held), prepared.request_id, held)
        assert isinstance(answer, StreamedAnswer)
        sink = DeltaSink()
        deltas = completer.deltas(prepared, held, sink)
        return EventStream(answer, prepared.request_id, await anext(deltas), deltas, sink)


async def _error_response(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            told = error
        case HTTPException():
            told = ApiError(error.status_code, f"{request.url.path}: {error.detail}", headers=error.headers or {})
        case ClientDisconnect():
            # In the middle of its body: nobody reads this answer.
            return Response(status_code=CLIENT_LEFT)
        case _:
            # Starlette logs the traceback after this answer.
            told = ApiError(500, "internal error")
    return told.response(request.url.path)
