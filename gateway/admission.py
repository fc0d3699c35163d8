"""Middleware in front of the API: checks who asks, bounds bodies, and bounds the requests that are served at a time."""

import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field

from prometheus_client import Counter
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.client_usage import ClientUsage
from gateway.endpoints import OPEN_PATHS
from gateway.errors import ApiError, shown
from gateway.held_answers import HeldAnswers
from gateway.keys import ApiKeys, Client

_BYTES_PER_TOKEN = 8
"""Of a prompt token: as much as an id takes in JSON, so that a prompt counts the same as text and as ids."""


@dataclass(frozen=True)
class RequestLimits:
    """max_total_bytes: of all requests being served. A request counts with its body, or its prompt if that is more."""

    max_body_bytes: int
    max_concurrent_requests: int
    max_total_bytes: int


@dataclass(eq=False)
class RequestBytes:
    """The bytes that one request counts with. answers: those of what is generated for it."""

    admission: "Admission"
    held: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.answers = self.admission.answers.account()

    def arrived(self, size: int) -> None:
        """Raises ApiError if a body of that size is too large (413), or there is no room for it (429)."""
        self.admission.check_size(size)
        self.body(size)

    def body(self, size: int) -> None:
        """Raises ApiError (429) if there is no room for a body of that size."""
        if size > self.held:
            self.admission.take(size - self.held)
            self.held = size

    def prompt(self, tokens: int) -> None:
        """Raises ApiError (429) if there is no room for a prompt of that many tokens."""
        self.body(_BYTES_PER_TOKEN * tokens)

    def close(self) -> None:
        """The request is answered, or refused."""
        self.admission.held -= self.held
        self.held = 0
        self.answers.close()


@dataclass(eq=False)
class Admission:
    """ASGI middleware. refused: counts refusals by reason.

    keys: None lets everyone in but web pages, which may post only from this gateway's origin and from `origins`.
    """

    app: ASGIApp
    keys: ApiKeys | None
    limits: RequestLimits
    answers: HeldAnswers
    usage: ClientUsage
    refused: Counter
    origins: Collection[str] = ()
    serving: int = field(init=False, default=0)
    """Requests that were admitted and are not answered completely."""
    held: int = field(init=False, default=0)
    """Their bytes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].removesuffix("/") in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        with closing(RequestBytes(self)) as counted:
            try:
                client = self._let_in(HTTPConnection(scope))
                if scope["type"] == "websocket":
                    await self.app({**scope, "key": client.key, "counted": counted}, receive, send)
                    return
                self._admit(client, Request(scope), counted)
            except ApiError as error:
                await error.response(scope["path"])(scope, receive, send)
                return
            self.serving += 1
            own = {"counted": counted, "sender": client, "usage": self.usage}
            try:
                await self.app({**scope, **own}, self._bounded(receive, counted), send)
            finally:
                self.serving -= 1
                self.usage.end(client, scope["access"].prepared)

    def take(self, size: int) -> None:
        """Raises ApiError (429) if all requests together would hold too many bytes."""
        if self.held + size > self.limits.max_total_bytes:
            raise self._busy("too_many_bytes", "holds as many bytes of requests as it may")
        self.held += size

    def _let_in(self, request: HTTPConnection) -> Client:
        """Who asks, or opens a WebSocket. Raises ApiError; for the key first, so others learn no limits."""
        client = self._client_of(request)
        if client is None:
            message = "the API key is not one of this server's"
            if not {"authorization", "x-api-key"} & set(request.headers):
                message = "no API key: expected the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise self._refused_with("api_key", ApiError(401, message, code="invalid_api_key"))
        request.scope["access"].client = client.name
        if request.scope.get("method", "POST") == "POST":
            self._check_page(request)
        return client

    def _admit(self, client: Client, request: Request, counted: RequestBytes) -> None:
        """Begin the client's request. Raises ApiError."""
        declared = int(request.headers.get("content-length", 0))
        self.check_size(declared)
        if self.serving >= self.limits.max_concurrent_requests:
            raise self._busy("too_many_requests", f"serves {self.serving} requests already")
        counted.body(declared)
        self.usage.begin(client, time.monotonic())

    def _check_page(self, request: HTTPConnection) -> None:
        """Raises ApiError for what any web page can have a browser post to a service on the user's own machine.

        Browsers name the page's origin, and post JSON across origins only after asking, which this gateway declines.
        """
        media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            text = f"content-type: expected application/json, found {shown(media_type)}"
            raise self._refused_with("media_type", ApiError(415, text, code="unsupported_media_type"))
        origin = request.headers.get("origin")
        if self.keys is not None or origin is None or origin in self.origins:
            return
        if origin.partition("://")[2] != request.headers.get("host"):
            text = f"web pages of {shown(origin)} may not post here: allow them with --allowed-origin of the gateway"
            raise self._refused_with("origin", ApiError(403, text, code="origin_not_allowed"))

    def _client_of(self, request: HTTPConnection) -> Client | None:
        """Whose key OpenAI's or Anthropic's header has, or None. Without keys, whatever is sent as one."""
        bearer = request.headers.get("authorization", "").encode("latin-1")
        alone = b"Bearer " + request.headers.get("x-api-key", "").encode("latin-1")
        for header in (bearer, alone):
            if self.keys is not None:
                if client := self.keys.find(header):
                    return client
            elif key := header.partition(b" ")[2].strip():
                return Client(key)
        return Client() if self.keys is None else None

    def _bounded(self, receive: Receive, counted: RequestBytes) -> Receive:
        """`receive` that raises ApiError for a body that is too large: not every body declares its length."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            counted.arrived(received)
            return message

        return bounded

    def check_size(self, size: int) -> None:
        """Raises ApiError (413) if a body of that size is too large."""
        if size > self.limits.max_body_bytes:
            text = f"the request body is larger than {self.limits.max_body_bytes} bytes"
            raise self._refused_with("body_too_large", ApiError(413, text, code="request_too_large"))

    def _busy(self, reason: str, state: str) -> ApiError:
        text = f"this gateway {state}; try again later"
        return self._refused_with(reason, ApiError(429, text, code="too_many_requests", retry_after=1.0))

    def _refused_with(self, reason: str, error: ApiError) -> ApiError:
        self.refused.labels(reason=reason).inc()
        return error
