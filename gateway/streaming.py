"""Answers as server-sent events, and what becomes of an answer when its client leaves."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any

import structlog
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.answers.streamed import StreamedAnswer
from gateway.choice import Delta
from gateway.errors import ApiError
from service.connection import ChunkWriter

log = structlog.get_logger(__name__)

Deltas = tuple[int, Sequence[Delta]]
"""The number of an answer, and the pieces that it goes on with; at least one."""

CLIENT_LEFT = 499


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, the answer is closed at once, which frees its decode node."""

    def __init__(self, events: AsyncGenerator[bytes, None], answer: AsyncGenerator[Deltas, None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._events = events
        self._answer = answer
        self._chunks: ChunkWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._chunks = scope.get("chunks")
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._answer.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the head, the events and the end: what is waiting in one write, past the middleware if possible."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        write = self._chunks.write if self._chunks is not None and self._chunks.open else None
        async for lines in self._events:
            if write is None:
                await send({"type": "http.response.body", "body": lines, "more_body": True})
            else:
                await write(lines)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(
    answer: StreamedAnswer, request_id: str, first: Deltas, rest: AsyncIterator[Deltas]
) -> AsyncGenerator[bytes, None]:
    """The lines of a stream."""
    if opening := answer.begin():
        yield answer.lines(opening)
    try:
        if lines := await _first_lines(answer, *first):
            yield lines
        async for index, deltas in rest:
            if deltas[0].prompt is None:
                lines = _lines(answer, index, deltas)
            else:
                lines = await _first_lines(answer, index, deltas)
            if lines:
                yield lines
        if last := answer.end():
            yield answer.lines(last)
    except ApiError as error:
        yield answer.lines(answer.failed(error))
    except Exception:
        log.exception("a stream failed", request_id=request_id)
        yield answer.lines(answer.failed(ApiError(500, f"internal error (request {request_id})")))
    if answer.last_line:
        yield answer.last_line


async def _first_lines(answer: StreamedAnswer, index: int, deltas: Sequence[Delta]) -> bytes:
    """The lines of deltas. Those of a prompt's log probabilities, which the first may have, may take a second: a thread
    makes them."""
    if deltas[0].prompt is None:
        return _lines(answer, index, deltas)
    return await asyncio.to_thread(_lines, answer, index, deltas)


def _lines(answer: StreamedAnswer, index: int, deltas: Sequence[Delta]) -> bytes:
    if len(deltas) == 1:
        return answer.written(index, deltas[0])
    return b"".join([answer.written(index, delta) for delta in deltas])


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
