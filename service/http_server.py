"""Serves an application on one listening socket, for clients that are not trusted: TLS, and limits on connections."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import uvicorn
from prometheus_client import Counter
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.connection import ConnectionLimits, GuardedConnection

log = structlog.get_logger(__name__)

_NO_DESCRIPTORS_PAUSE_S = 1.0
_TLS_SHUTDOWN_S = 5.0

Serve = Callable[[Callable[[], None]], asyncio.Protocol]
"""Makes the protocol of one connection, which calls what it is given when the connection is closed."""


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves signals to the process, and whose connections come through a `Door`.

    tls: the context for new connections, asked for each, so that it may change; None: plain HTTP.
    stop_timeout: seconds that running requests have when the server stops.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        limits: ConnectionLimits,
        refused: Counter,
        tls: Callable[[], ssl.SSLContext] | None = None,
        stop_timeout: int | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=H11Protocol,
                ws="none",
                interface="asgi3",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=stop_timeout,
            )
        )
        self._listener = listener
        self._limits = limits
        self._refused = refused
        self._tls = tls
        self._door: Door | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """What uvicorn does on a listening socket of its own."""
        self.servers = []
        self._door = Door(self._listener, self._limits, self._refused, self._tls)
        self._door.open(self._connection)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door is not None:
            await self._door.close()
        await super().shutdown(sockets)

    def _connection(self, ended: Callable[[], None]) -> GuardedConnection:
        return GuardedConnection(
            self.config, self.server_state, self.lifespan.state, self._limits, self._refused, ended
        )


class Door:
    """Accepts connections, no more at a time than allowed, and does their TLS handshakes.

    asyncio's own servers count a connection only after its handshake, for which they wait a minute: whoever connects
    and says nothing would take file descriptors without end.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: ConnectionLimits,
        refused: Counter,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self._listener = listener
        self._limits = limits
        self._refused = refused
        self._tls = tls
        self._open = 0
        """Connections accepted and not closed, handshakes included."""
        self._entering: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def open(self, serve: Serve) -> None:
        """Accept from now on, and hand each connection to a protocol of `serve`."""
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(serve))

    async def close(self) -> None:
        """Accept no more, and end the handshakes that are going on."""
        ending = [*self._entering, *([self._accepting] if self._accepting else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._listener.close()

    async def _accept(self, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("cannot accept a connection", error=error.strerror)
                await asyncio.sleep(_NO_DESCRIPTORS_PAUSE_S)
                continue
            if self._open < self._limits.max_connections:
                self._open += 1
                task = loop.create_task(self._enter(connection, serve))
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)
            else:
                self._refused.labels(reason="too_many_connections").inc()
                connection.close()
            # A flood of connections waits its turn like everyone else.
            await asyncio.sleep(0)

    async def _enter(self, connection: socket.socket, serve: Serve) -> None:
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return serve(self._leave)

        connection.setblocking(False)
        # asyncio does so only for sockets that were made with TCP's number. Without it a token waits until the client
        # has acknowledged the one before, which it puts off for up to 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if self._tls is None:
                await loop.connect_accepted_socket(protocol, connection)
            else:
                await loop.connect_accepted_socket(
                    protocol,
                    connection,
                    ssl=self._tls(),
                    ssl_handshake_timeout=self._limits.header_timeout,
                    ssl_shutdown_timeout=_TLS_SHUTDOWN_S,
                )
        except OSError:
            self._leave()
            if self._tls is not None:
                # No TLS, none in common with ours, no trust in our certificate, or nothing at all for too long.
                self._refused.labels(reason="tls_handshake").inc()

    def _leave(self) -> None:
        self._open -= 1
