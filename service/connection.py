"""An HTTP connection with deadlines for the request's head, for its body, and for the client to read the answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, Protocol

import h11
from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

LARGE_BYTES = 256 << 10
"""A larger body is written in parts, so that the loop turns and the client reads in between."""
BODY_FLOOR = 8 << 10
"""Bytes per second that a body must reach after its first `header_timeout` seconds."""
_UNWANTED_BYTES = 64 << 10
"""How much is read of a body whose request is already answered. A client that sends less keeps its connection."""
_LINGER_S = 1.0
"""Delay before closing on a client that still sends: an earlier reset could destroy the answer before it is read."""
_MAX_HEAD_BYTES = 16 << 10
SMALL_CHUNKS = 4096
SMALL_CHUNK_BYTES = 64
"""A body of more chunks must have larger ones on average: each costs 20 us, even if it holds a single byte."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on what clients may take of a server. Times are in seconds."""

    max_connections: int = 256
    header_timeout: float = 10.0
    """For a request's head, and for a TLS handshake. A body gets as long, plus 1 s per 8 KiB received."""
    reader_timeout: float = 60.0
    """For a client that does not read its answer."""
    max_message_bytes: int = 0
    """Of a WebSocket's message; 0: no WebSockets."""


class ChunkTurns:
    """The writers that were given something in this turn of an event loop: at its end, each makes one write."""

    def __init__(self) -> None:
        self._writers: list[ChunkWriter] = []

    def add(self, writer: "ChunkWriter") -> None:
        if not self._writers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._writers.append(writer)

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.flush()


class ChunkWriter:
    """Writes chunks of one response past h11 and an ASGI application's layers. A request's scope has it as "chunks".

    An event of h11, or a message through the layers, costs as much processor time as the text of a token.
    """

    __slots__ = ("_flow", "_transport", "_turns", "_waiting", "open")

    def __init__(self, flow: FlowControl, transport: asyncio.Transport, turns: ChunkTurns) -> None:
        self._flow = flow
        self._transport = transport
        self._turns = turns
        self._waiting = b""
        """Bytes of this turn: in most turns one event."""
        self.open = False
        """Whether the response has begun, and has chunks. ASGI's `send` sends other bodies, and the end of all."""

    @property
    def paused(self) -> bool:
        """Whether the client is slow to read."""
        return self._flow.write_paused

    async def write(self, body: bytes) -> None:
        """As `write_soon`, but waits while the client is slow to read."""
        for start in range(0, len(body), LARGE_BYTES):
            if self.paused and not self._transport.is_closing():
                await self._flow.drain()
            self.write_soon(body[start : start + LARGE_BYTES])
            if len(body) > LARGE_BYTES:
                self.flush()

    def write_soon(self, body: bytes) -> None:
        """Write at the end of this turn. Call it only where the client is not slow to read."""
        if not self._waiting:
            self._turns.add(self)
        self._waiting += body

    def flush(self) -> None:
        """Write what waits as one chunk, unless the client has left."""
        body, self._waiting = self._waiting, b""
        if body and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class _Parser(h11.Connection):
    """h11's parser, with a limit on tiny chunks, of which h11 itself accepts any number."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self._chunks = 0
        self._chunk_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._chunk_bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS and self._chunk_bytes < self._chunks * SMALL_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body's chunks are too small")
        return event


class ConnectionOwner(Protocol):
    """The server of connections. refused: counts refusals by reason. closed: called once a connection is closed."""

    limits: ConnectionLimits
    refused: Counter
    chunk_turns: ChunkTurns

    def closed(self) -> None: ...


class ReaderDeadline(asyncio.Protocol):
    """What connections of both kinds have: a deadline for the client to read, and a count of refusals by reason.

    It stands before a protocol of uvicorn among the bases.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _owner: ConnectionOwner
    _reader_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._reader_caught_up()

    def _expect_reader(self) -> None:
        """Start the deadline for the client to read what is written: a connection closes only after that."""
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self._owner.limits.reader_timeout, self._give_up_on_reader)

    def _reader_caught_up(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _give_up_on_reader(self) -> None:
        self._count("reader_timeout")
        self.transport.abort()

    def _count(self, reason: str) -> None:
        self._owner.refused.labels(reason=reason).inc()


class GuardedConnection(ReaderDeadline, H11Protocol):
    """uvicorn's HTTP/1.1 protocol on h11, with the deadlines that uvicorn lacks.

    Between two requests uvicorn's own keep-alive time applies.
    """

    def __init__(self, config: Config, state: ServerState, app_state: dict[str, Any], owner: ConnectionOwner) -> None:
        super().__init__(config, state, app_state, asyncio.get_running_loop())
        # What uvicorn calls for each request.
        self.app: Callable[[Scope, Receive, Send], Awaitable[None]] = partial(self._served_by, self.app)
        self.conn = _Parser()
        self._owner = owner
        self._expected: Literal["header", "body"] | None = None
        """The part of a request that has a deadline now."""
        self._expected_since = 0.0
        self._received = 0
        """Bytes since then."""
        self._unwanted = 0
        """Bytes received of a body whose request is already answered."""
        self._request_timer: asyncio.TimerHandle | None = None

    async def _served_by(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, which gets a ChunkWriter that opens when the answer turns out to have chunks."""
        chunks = ChunkWriter(self.flow, self.transport, self._owner.chunk_turns)

        async def send_and_look(message: Message) -> None:
            chunks.flush()
            await send(message)
            if message["type"] == "http.response.start":
                chunks.open = (
                    scope["method"] != "HEAD"
                    and scope["http_version"] == "1.1"
                    and message["status"] >= HTTPStatus.OK
                    and message["status"] not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
                    and not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                )

        await app({**scope, "chunks": chunks}, receive, send_and_look)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect("header")

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._reader_caught_up()
        self._unset_keepalive_if_required()
        self._owner.closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._expected is None and self.conn.their_state is h11.IDLE:
            self._expect("header")
        self._received += len(data)
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._unwanted += len(data)
            if self._unwanted > _UNWANTED_BYTES:
                self._expect(None)
                self.flow.pause_reading()
                self._request_timer = self.loop.call_later(_LINGER_S, self._close)
                return
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        return self.scope["method"] == "GET" and super()._should_upgrade()

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.get_protocol() is not self:
            # From now on it is a WebSocket.
            self._expect(None)
            return
        if self.conn.their_state is h11.SEND_BODY:
            if self._expected != "body":
                self._expect("body")
        elif self.conn.their_state is not h11.IDLE:
            self._expect(None)

    def on_response_complete(self) -> None:
        self._unwanted = 0
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reader()

    def send_400_response(self, msg: str) -> None:
        self._count("malformed")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        # Otherwise the request was answered before its body turned out to be malformed.
        self._close()

    def _expect(self, part: Literal["header", "body"] | None) -> None:
        """Start the deadline of this part of a request, or cancel the deadline if None."""
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
        self._expected = part
        if part is not None:
            self._expected_since = self.loop.time()
            self._received = 0
            self._request_timer = self.loop.call_later(self._owner.limits.header_timeout, self._check_deadline)

    def _check_deadline(self) -> None:
        allowed = self._owner.limits.header_timeout
        if self._expected == "body":
            allowed += self._received / BODY_FLOOR
        left = self._expected_since + allowed - self.loop.time()
        if self.flow.read_paused:
            # The application is slow, not the client.
            left = max(left, self._owner.limits.header_timeout)
        if left > 0:
            self._request_timer = self.loop.call_later(left, self._check_deadline)
        else:
            self._time_out()

    def _time_out(self) -> None:
        part, silent = self._expected, self._expected == "header" and not self._received
        self._expect(None)
        self._count(f"{part}_timeout")
        if not silent and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_408(f"the request's {part} did not arrive in time")
        if self.cycle is not None:
            # Tells the application, if it waits for the rest of the body, that the client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close()

    def _send_408(self, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "request_timeout"}
        body = json.dumps({"error": error}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        head = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _close(self) -> None:
        self.transport.close()
        self._expect_reader()
