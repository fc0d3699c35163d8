"""A WebSocket connection with the deadlines and bounds of an HTTP connection."""

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import PayloadTooBig
from websockets.http11 import Request

from service.connection import BODY_FLOOR, SMALL_CHUNK_BYTES, SMALL_CHUNKS, ConnectionLimits

_SLICE_BYTES = 4 << 10
"""How much is read before frames are counted: a frame takes 10 us, and may have 6 bytes."""


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, with what it lacks. Its scope has it as "socket".

    Messages come as bytes, whatever the client says they are. refused, closed: as of `GuardedConnection`.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        refused: Counter,
        closed: Callable[[], None],
    ) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self.takes: Callable[[int], bool] = lambda size: True
        """Whether there is room for so many bytes of a message that has not arrived completely."""
        self.busy = False
        """Whether the application answers a message. A server that stops lets it do so."""
        self.stopping = False
        """Whether the application is to close the connection once it is not busy."""
        self._limits = limits
        self._refused = refused
        self._closed = closed
        self._received = 0
        """Bytes since the connection was made."""
        self._frames = 0
        self._arriving = 0
        """Bytes of a message that has not arrived completely."""
        self._arriving_since = 0.0
        self._message_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

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
            self._message_timer = self.loop.call_later(self._limits.header_timeout, self._check_deadline)
        if self._arriving and not self.takes(self._arriving):
            self.fail(None, 1013, "too many bytes of requests are held: try again later")

    def handle_events(self) -> None:
        self._frames += len(self.conn.events)
        super().handle_events()

    def send_receive_event_to_app(self) -> None:
        self.curr_msg_data_type = "bytes"
        super().send_receive_event_to_app()
        self._arrived()

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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None and not self.transport.is_closing():
            self._reader_timer.cancel()
            self._reader_timer = None

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self._expect_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        self._closed()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.busy:
            self.stopping = True
        else:
            super().shutdown()

    def _arrived(self) -> None:
        self._arriving = 0
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _check_deadline(self) -> None:
        allowed = self._limits.header_timeout + self._arriving / BODY_FLOOR
        left = self._arriving_since + allowed - self.loop.time()
        if left > 0:
            self._message_timer = self.loop.call_later(left, self._check_deadline)
        else:
            self.fail("body_timeout", 1008, "the message did not arrive in time")

    def _expect_reader(self) -> None:
        """Start the deadline for the client to read what is written."""
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self._limits.reader_timeout, self._give_up_on_reader)

    def _give_up_on_reader(self) -> None:
        self._count("reader_timeout")
        self.transport.abort()

    def fail(self, counted: str | None, code: int, reason: str) -> None:
        """Close the connection. counted: the reason to count, unless it is counted elsewhere."""
        if not self.transport.is_closing():
            if counted is not None:
                self._count(counted)
            self.conn.fail(code, reason)
            self.handle_parser_exception()
            self._expect_reader()

    def _count(self, reason: str) -> None:
        self._refused.labels(reason=reason).inc()
