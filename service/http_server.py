"""HTTP server for clients that are not trusted: uvicorn behind TLS and a bound on connections."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import structlog
import uvicorn
from prometheus_client import Counter
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.connection import ChunkTurns, ConnectionLimits, GuardedConnection
from service.websocket import GuardedWebSocket

log = structlog.get_logger(__name__)

_ACCEPT_RETRY_S = 1.0
_TLS_SHUTDOWN_S = 5.0


class HttpServer(uvicorn.Server):
    """Serves an ASGI application on one listening socket, which it closes at the end. Leaves signals to the process.

    It accepts connections itself. asyncio's servers count a connection only after its TLS handshake and wait a minute
    for that, so clients that connect and send nothing would use up the file descriptors.

    tls: called for each connection, so that the certificate may change; None serves plain HTTP.
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
        config = uvicorn.Config(
            app,
            http=H11Protocol,
            ws=partial(GuardedWebSocket, owner=self)  # type: ignore[arg-type]
            if limits.max_message_bytes
            else "none",
            ws_max_size=limits.max_message_bytes,
            # It would take memory for each connection, and time on the event loop.
            ws_per_message_deflate=False,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=stop_timeout,
        )
        super().__init__(config)
        self._listener = listener
        self.limits = limits
        self.refused = refused
        self._tls = tls
        self.chunk_turns = ChunkTurns()
        self._open_connections = 0
        """Connections accepted and not closed, including those in a TLS handshake."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The accept loop and the handshakes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self._listener.setblocking(False)
        self._start(self._accept())
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        await super().shutdown()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("cannot accept a connection", error=error.strerror)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if self._open_connections < self.limits.max_connections:
                self._open_connections += 1
                self._start(self._connect(connection))
            else:
                self.refused.labels(reason="too_many_connections").inc()
                connection.close()
            # sock_accept does not yield while connections are waiting: a flood of them would starve the loop.
            await asyncio.sleep(0)

    async def _connect(self, connection: socket.socket) -> None:
        """Do the TLS handshake, if any, and serve the connection."""
        connection.setblocking(False)
        # asyncio sets it only on sockets created with TCP's protocol number. Without it a token waits until the client
        # acknowledges the one before, which may take 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls: dict[str, Any] = {}
        try:
            if self._tls is not None:
                tls = {
                    "ssl": self._tls(),
                    "ssl_handshake_timeout": self.limits.header_timeout,
                    "ssl_shutdown_timeout": _TLS_SHUTDOWN_S,
                }
            protocol = partial(GuardedConnection, self.config, self.server_state, self.lifespan.state, self)
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection, **tls)
        except OSError:
            self.closed()
            if self._tls is not None:
                # Not TLS, no version in common, the certificate is not trusted, or the handshake took too long.
                self.refused.labels(reason="tls_handshake").inc()

    def closed(self) -> None:
        self._open_connections -= 1
