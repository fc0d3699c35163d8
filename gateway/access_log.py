"""Middleware around all answers of a gateway: their ids, a line in the log for each, and a count of them.

What the log says of the tokens of a request comes from its `AnswerOutcome`s when it has ended: a token costs nothing
here.
"""

import re
import time
import uuid
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import structlog
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from base.tracing import NO_SPAN, AttributeValue, Tracer, TraceSpan
from gateway.endpoints import ENDPOINTS, OPEN_PATHS
from gateway.errors import is_anthropic
from gateway.preparer import PreparedRequest
from gateway.streaming import CLIENT_LEFT

log = structlog.get_logger(__name__)

OTHER = "other"
"""The name of all paths that are no endpoint, so that the labels of metrics are bounded."""
_FIXED = OPEN_PATHS | frozenset(endpoint.path for endpoint in ENDPOINTS)
_PATTERNS = tuple((compile_path(path.replace("}", ":path}"))[0], path) for path in sorted(_FIXED) if path.endswith("}"))
_SANE_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class AccessRecord:
    """What is known of an HTTP request. Whoever learns more of it fills that in: a scope has it as "access"."""

    http_request_id: str
    client: str | None = None
    """The name of the client's key."""
    prepared: PreparedRequest | None = None
    """What is generated for it."""
    status: int = CLIENT_LEFT
    started: float = field(default_factory=time.monotonic)
    span: TraceSpan = NO_SPAN

    def fields(self) -> dict[str, Any]:
        """What the log says of it, times in seconds. Without a client or prompts there are no fields of these."""
        said: dict[str, Any] = {"status": self.status, "seconds": round(time.monotonic() - self.started, 4)}
        if self.client is not None:
            said["client"] = self.client
        if self.prepared is None:
            return said
        outcomes = [each.outcome for each in self.prepared.tokenized]
        first_tokens = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
        return {
            **said,
            "request_id": self.prepared.request_id,
            "reason": "|".join(dict.fromkeys(outcome.reason for outcome in outcomes)),
            "nodes": "|".join(dict.fromkeys(node for outcome in outcomes for node in outcome.nodes)),
            "prompt_tokens": self.prepared.prompt_tokens,
            "cached_tokens": self.prepared.cached_tokens,
            "tokens": self.prepared.generated_tokens,
            "ttft_s": round(min(first_tokens), 4) if first_tokens else None,
        }

    def attributes(self) -> dict[str, AttributeValue | None]:
        """What the span of the request says of it at its end: the names of `gen_ai` are vLLM's."""
        said: dict[str, AttributeValue | None] = {
            "http.response.status_code": self.status,
            "http_request_id": self.http_request_id,
        }
        if self.prepared is None:
            return said
        generate, outcomes = self.prepared.tokenized[0].generate, [each.outcome for each in self.prepared.tokenized]
        return {
            **said,
            "gen_ai.request.id": self.prepared.request_id,
            "gen_ai.request.max_tokens": generate.max_new_tokens,
            "gen_ai.request.n": self.prepared.request.choices,
            "gen_ai.request.temperature": generate.sampling.temperature,
            "gen_ai.request.top_p": generate.sampling.top_p,
            "gen_ai.usage.prompt_tokens": self.prepared.prompt_tokens,
            "gen_ai.usage.completion_tokens": self.prepared.generated_tokens,
            "gen_ai.usage.num_sequences": len(outcomes),
            "gen_ai.latency.time_to_first_token": min((each.ttft for each in outcomes if each.ttft), default=None),
            "gen_ai.latency.e2e": time.monotonic() - self.started,
            "cached_tokens": self.prepared.cached_tokens,
            "migrations": sum(each.migrations for each in outcomes),
            "reason": "|".join(dict.fromkeys(each.reason for each in outcomes)),
        }


class AccessLog:
    """ASGI middleware, the outermost; scopes have it as "served_by". answered: counts by endpoint and status."""

    def __init__(self, app: ASGIApp, answered: Counter, tracer: Tracer) -> None:
        self._app = app
        self._answered = answered
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, endpoint = Headers(scope=scope), endpoint_name(scope["path"])
        given = headers.get("x-request-id", "")
        access = AccessRecord(given if _SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}")
        # The turns of a WebSocket have spans of their own.
        if endpoint not in OPEN_PATHS and scope["type"] == "http":
            method = scope["method"] if scope["method"] in ("GET", "POST") else OTHER
            access.span = self._tracer.serve(f"{method} {endpoint}", headers, access.started)
        sent_id = access.http_request_id.encode()
        names = (b"x-request-id", b"request-id") if is_anthropic(scope["path"]) else (b"x-request-id",)

        async def send_with_id(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
                access.status = message.get("status", HTTPStatus.SWITCHING_PROTOCOLS.value)
                own = [(name, sent_id) for name in names]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            await self._app({**scope, "access": access, "served_by": self}, receive, send_with_id)
        finally:
            self._answered.labels(endpoint, str(access.status)).inc()
            say = log.debug if endpoint in OPEN_PATHS else log.info
            access.span.note(access.attributes)
            access.span.fail(f"HTTP status {access.status}" if access.status >= 500 else None)
            access.span.end()
            say("answered", endpoint=endpoint, http_request_id=access.http_request_id, **access.fields())


def endpoint_name(path: str) -> str:
    """The endpoint of a path as `ENDPOINTS` writes it, whatever the method; OTHER if there is none."""
    if path in _FIXED:
        return path
    return next((name for pattern, name in _PATTERNS if pattern.match(path)), OTHER)
