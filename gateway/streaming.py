"""Answers as server-sent events, and what becomes of an answer when its client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.answers.streamed import StreamedAnswer
from gateway.attempt import Delta, DeltaSink
from gateway.errors import ApiError
from gateway.held_answers import HeldBytes
from service.connection import LARGE_BYTES, ChunkWriter

log = structlog.get_logger(__name__)

_T = TypeVar("_T")
Deltas = tuple[int, Sequence[Delta]]
"""The number of an answer, and the pieces that it goes on with; at least one."""

CLIENT_LEFT = 499
_DELTAS_AT_ONCE = 16
"""Of those that have waited for a slow client, what is rendered in one turn of the loop."""


class EventStream(StreamingResponse):
    """An answer as server-sent events. However the response ends, the answer is closed, which frees its decode node.

    Where the connection takes chunks, the sink writes most deltas as they arrive. The others come through `deltas`.
    """

    def __init__(
        self,
        answer: StreamedAnswer,
        request_id: str,
        first: Deltas,
        deltas: AsyncGenerator[Deltas, None],
        sink: DeltaSink,
    ) -> None:
        """first: what `deltas` has yielded already."""
        self._answer = answer
        self._request_id = request_id
        self._deltas = deltas
        self._sink = sink
        self._events = self._lines(first)
        super().__init__(
            self._events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Starlette's own way through a task group takes several times as long.
            await unless_client_leaves(receive, self._stream(scope.get("chunks"), send))
        finally:
            await self._events.aclose()
            await self._deltas.aclose()

    async def _stream(self, chunks: ChunkWriter | None, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if chunks is not None and chunks.open:
            # Without this stream, which would keep itself alive.
            self._sink.take = partial(self._write_soon, self._answer, chunks)
            async for lines in self._events:
                await chunks.write(lines)
        else:
            async for lines in self._events:
                await send({"type": "http.response.body", "body": lines, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    def _write_soon(answer: StreamedAnswer, chunks: ChunkWriter, delta: Delta) -> bool:
        """Write a delta of the only answer. False: it ends the answer, may take long, or the client is slow."""
        if delta.finish_reason is not None or delta.prompt is not None or chunks.paused:
            return False
        if answer.kept_bytes > LARGE_BYTES:
            return False
        chunks.write_soon(answer.encode_delta(0, delta))
        return True

    async def _lines(self, first: Deltas) -> AsyncGenerator[bytes, None]:
        """The lines of the stream, those of all deltas that are waiting at once."""
        answer = self._answer
        if opening := answer.begin():
            yield answer.encode(opening)
        try:
            if lines := await self._encoded(*first):
                yield lines
            async for index, deltas in self._deltas:
                for start in range(0, len(deltas), _DELTAS_AT_ONCE):
                    if start:
                        await asyncio.sleep(0)
                    some = deltas[start : start + _DELTAS_AT_ONCE]
                    if answer.kept_bytes > LARGE_BYTES:
                        for event in (event for delta in some for event in answer.delta_events(index, delta)):
                            yield answer.encode([event])
                    elif lines := await self._encoded(index, some):
                        yield lines
            if last := answer.end():
                yield answer.encode(last)
        except ApiError as error:
            yield answer.encode(answer.failed(error))
        except Exception:
            log.exception("a stream failed", request_id=self._request_id)
            yield answer.encode(answer.failed(ApiError(500, f"internal error (request {self._request_id})")))
        if answer.last_line:
            yield answer.last_line

    async def _encoded(self, index: int, deltas: Sequence[Delta]) -> bytes:
        """The lines of deltas. A thread makes those of a prompt's log probabilities, which may take a second."""

        def encoded() -> bytes:
            return b"".join([self._answer.encode_delta(index, delta) for delta in deltas])

        return encoded() if deltas[0].prompt is None else await asyncio.to_thread(encoded)


class WholeAnswer(Response):
    """An answer that does not stream. It is sent in slices, so that it counts until its client has read it."""

    media_type = "application/json"

    def __init__(self, body: bytes, request_id: str, held: HeldBytes) -> None:
        super().__init__(body)
        self._request_id = request_id
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= LARGE_BYTES:
            await super().__call__(scope, receive, send)
            return
        sending = asyncio.ensure_future(self._send(send))
        self._held.abort = sending.cancel
        if self._held.error is not None:
            sending.cancel()
        try:
            await sending
        except asyncio.CancelledError:
            if self._held.error is None:
                raise
            log.warning("an answer is not sent to its end: too many bytes are held", request_id=self._request_id)
        finally:
            sending.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), LARGE_BYTES):
            stop = start + LARGE_BYTES
            more = stop < len(self.body)
            await send({"type": "http.response.body", "body": self.body[start:stop], "more_body": more})


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """The result of `work`; None if the client disconnects first, which cancels it."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
