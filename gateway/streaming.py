"""Answers as server-sent events, and what becomes of an answer when its client leaves."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

import structlog
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.answers.streamed import StreamedAnswer
from gateway.choice import Delta
from gateway.errors import ApiError

log = structlog.get_logger(__name__)

CLIENT_LEFT = 499


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, the answer is closed at once, which frees its decode node."""

    def __init__(self, events: AsyncGenerator[bytes, None], answer: AsyncGenerator[tuple[int, Delta], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._events = events
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._answer.aclose()


async def events(
    answer: StreamedAnswer, request_id: str, first: tuple[int, Delta], rest: AsyncIterator[tuple[int, Delta]]
) -> AsyncGenerator[bytes, None]:
    """The lines of a stream."""
    if opening := answer.begin():
        yield answer.lines(opening)
    try:
        if some := await _more(answer, *first):
            yield some
        async for index, delta in rest:
            if some := await _more(answer, index, delta):
                yield some
        if last := answer.end():
            yield answer.lines(last)
    except ApiError as error:
        yield answer.lines(answer.failed(error))
    except Exception:
        log.exception("a stream failed", request_id=request_id)
        yield answer.lines(answer.failed(ApiError(500, f"internal error (request {request_id})")))
    if answer.last_line:
        yield answer.last_line


async def _more(answer: StreamedAnswer, index: int, delta: Delta) -> bytes:
    """The lines of a delta. Those of a prompt's log probabilities may take a second: a thread makes them."""
    if delta.prompt is None:
        return answer.lines(answer.more(index, delta))
    return await asyncio.to_thread(lambda: answer.lines(answer.more(index, delta)))


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of `work`, which is cancelled if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        return Response(status_code=CLIENT_LEFT)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
