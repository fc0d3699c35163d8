"""The HTTP routes of OpenAI's, Anthropic's and vLLM's APIs, and error responses."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.admission import RequestBytes
from gateway.attempt import DeltaSink
from gateway.completer import Completer
from gateway.endpoints import ENDPOINTS, Computes, Endpoint, Generates, Reads
from gateway.errors import ApiError
from gateway.openapi import document
from gateway.streaming import CLIENT_LEFT, EventStream, WholeAnswer, unless_client_leaves


class ApiServer:
    """Answers the API's routes. `rejection_reason` returns why no request can be taken now, or None."""

    def __init__(self, completer: Completer, rejection_reason: Callable[[], ApiError | None]) -> None:
        self._completer = completer
        self._rejection_reason = rejection_reason
        self._document = document()

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        for error in (ApiError, HTTPException, ClientDisconnect, Exception):
            app.add_exception_handler(error, _error_response)
        app.add_api_route("/openapi.json", self._openapi, methods=["GET"])
        for endpoint in ENDPOINTS:
            if (handler := self._handler(endpoint)) is not None:
                method = "GET" if isinstance(endpoint, Reads) else "POST"
                app.add_api_route(endpoint.path.replace("}", ":path}"), handler, methods=[method])
        return app

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)

    def _handler(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]] | None:
        """What answers an endpoint; None if that is the status page."""
        completer = self._completer

        async def read(http: Request) -> Response:
            assert isinstance(endpoint, Reads)
            return JSONResponse(endpoint.render(completer, **http.path_params))

        async def compute(http: Request) -> Response:
            assert isinstance(endpoint, Computes)
            render = endpoint.render
            answer = await completer.read(await http.body(), endpoint.body, lambda body: render(body, completer))
            return JSONResponse(answer)

        async def generate(http: Request) -> Response:
            assert isinstance(endpoint, Generates)
            work = self._generate(endpoint, await http.body(), http.scope["counted"], http.scope["client_key"])
            return await unless_client_leaves(http, work)

        match endpoint:
            case Reads():
                return read
            case Computes():
                return compute
            case Generates():
                return generate
        return None

    async def _generate(self, endpoint: Generates, body: bytes, counted: RequestBytes, client_key: bytes) -> Response:
        """The complete answer, or a stream once it has its first tokens: until then an error has an HTTP status."""
        completer, held = self._completer, counted.answers
        prepared = await completer.prepare(body, endpoint.body, endpoint.id_prefix, client_key)
        counted.prompt(prepared.prompt_tokens)
        if reason := self._rejection_reason():
            raise reason
        answer = endpoint.renderer(prepared, completer.model, completer.tokenizer, held)
        if not prepared.request.stream:
            return WholeAnswer(await completer.whole(prepared, answer, held), prepared.request_id, held)
        sink = DeltaSink()
        deltas = completer.deltas(prepared, held, sink)
        return EventStream(answer, prepared.request_id, await anext(deltas), deltas, sink)


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
