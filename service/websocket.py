"""A WebSocket connection with the deadlines and bounds of an HTTP connection."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import PayloadTooBig
from websockets.http11 import Request

from service.connection import BODY_FLOOR, SMALL_CHUNK_BYTES, SMALL_CHUNKS, ConnectionOwner, ReaderDeadline

_MOST_WAITING = 16
"""Messages that may wait while one is answered."""
_SLICE_BYTES = 4 << 10
"""How much is read before frames are counted: a frame takes 10 us, and may have 6 bytes."""


class GuardedWebSocket(ReaderDeadline, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, with what it lacks. Its scope has it as "socket".

    Messages come as bytes, whatever the client says they are.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], owner: ConnectionOwner
    ) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self.takes: Callable[[int], bool] = lambda size: True
        """Whether there is room for so many bytes of messages that the application has not received."""
        self.left = asyncio.Event()
        """The connection is closed."""
        self.busy = False
        """Whether the application answers a message. A server that stops waits for that."""
        self.idle_since = self.loop.time()
        self._stopping = False
        self._owner = owner
        self._received = 0
        """Bytes since the connection was made."""
        self._frames = 0
        self._arriving = 0
        """Bytes of a message that is not complete."""
        self._arriving_since = 0.0
        self._waiting = 0
        """Bytes of complete messages."""
        self._message_timer: asyncio.TimerHandle | None = None

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.handshake_complete:
            # It is refused.
            return
        self.scope["socket"] = self  # type: ignore[typeddict-unknown-key]
        # Frames wait until the connection is accepted: the application's first `receive` resumes reading.
        self.read_paused = True
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            piece = data[start : start + _SLICE_BYTES]
            self._received += len(piece)
            self._arriving += len(piece)
            super().data_received(piece)
            if self._frames > SMALL_CHUNKS and self._received < self._frames * SMALL_CHUNK_BYTES:
                self.fail("malformed", 1008, "the frames are too small")
            if self.conn.handshake_exc is not None:
                self._count("malformed")
                self.transport.write(b"".join(self.conn.data_to_send()))
                self.transport.close()
            if self.transport.is_closing():
                return
        if not (self.frames or self.conn.reader.buffer):
            # All that came were complete messages, pings and pongs.
            self._arrived()
        elif self._message_timer is None:
            self._arriving_since = self.loop.time()
            self._message_timer = self.loop.call_later(self._owner.limits.header_timeout, self._check_deadline)
        if not self.takes(self._waiting + self._arriving):
            self.fail(None, 1013, "too many bytes of requests are held: try again later")

    def handle_events(self) -> None:
        self._frames += len(self.conn.events)
        super().handle_events()

    def send_receive_event_to_app(self) -> None:
        self._waiting += sum(map(len, self.frames))
        self.curr_msg_data_type = "bytes"
        # uvicorn would stop reading, and a client that leaves would not be noticed.
        self.read_paused = True
        super().send_receive_event_to_app()
        self._arrived()
        if self.queue.qsize() > _MOST_WAITING:
            self.fail("too_many_messages", 1008, "too many messages wait for their responses")

    async def receive(self) -> ASGIReceiveEvent:
        self.busy, self.idle_since = False, self.loop.time()
        if self._stopping:
            super().shutdown()
        event = await super().receive()
        if event["type"] == "websocket.receive":
            self.busy = True
            self._waiting -= len(event["bytes"] or b"")
            self.takes(self._waiting + self._arriving)
        return event

    async def send(self, message: ASGISendEvent) -> None:
        if self.close_sent:
            # Closed here, which the application has not received yet.
            raise ClientDisconnected()
        await super().send(message)

    def handle_parser_exception(self) -> None:
        if (error := self.conn.parser_exc) is not None:
            self._count("body_too_large" if isinstance(error, PayloadTooBig) else "malformed")
        super().handle_parser_exception()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            # The client does not read: pongs would pile up.
            self.conn.data_to_send()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self._expect_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._reader_caught_up()
        self._owner.closed()
        self.left.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.busy:
            self._stopping = True
        else:
            super().shutdown()

    def _arrived(self) -> None:
        self._arriving = 0
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _check_deadline(self) -> None:
        allowed = self._owner.limits.header_timeout + self._arriving / BODY_FLOOR
        left = self._arriving_since + allowed - self.loop.time()
        if left > 0:
            self._message_timer = self.loop.call_later(left, self._check_deadline)
        else:
            self.fail("body_timeout", 1008, "the message did not arrive in time")

    def fail(self, counted: str | None, code: int, reason: str) -> None:
        """Close the connection. counted: the reason to count, unless it is counted elsewhere."""
        if not self.transport.is_closing():
            if counted is not None:
                self._count(counted)
            self.conn.fail(code, reason)
            self.handle_parser_exception()
            self._expect_reader()
