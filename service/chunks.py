"""Chunks of a response's body, written to the transport past h11 and the layers of an ASGI application.

An event of h11, or a message through the layers, costs as much processor time as the text of a token.
"""

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

LARGE_BYTES = 256 << 10
"""What is larger is written in parts, so that the loop turns and the client reads in between."""


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
    """Writes chunks of one response. The scope of a request has it, as "chunks"."""

    __slots__ = ("_flow", "_transport", "_turns", "_waiting", "open")

    def __init__(self, flow: FlowControl, transport: asyncio.Transport, turns: ChunkTurns) -> None:
        self._flow = flow
        self._transport = transport
        self._turns = turns
        self._waiting = b""
        """What was given in this turn: in most turns one event."""
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
