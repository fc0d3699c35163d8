"""The status page of every process: /health, /ready, /metrics, /version."""

import errno
import socket
import threading
from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, Counter
from typing_extensions import TypedDict

from base.errors import StartupError
from base.metrics import Metrics
from base.version import VERSION
from control.codec import PROTOCOL_VERSION
from service.connection import ConnectionLimits
from service.http_server import HttpServer


class Health(TypedDict):
    """The process runs."""

    status: Literal["ok"]


class Ready(TypedDict):
    """Requests can be served."""

    status: Literal["ready"]


class NotReady(TypedDict):
    """Requests cannot be served now."""

    status: Literal["not ready"]
    reason: str


class Version(TypedDict):
    """The project's version, and that of the protocol between its processes."""

    version: str
    protocol: int


def status_router(not_ready_reason: Callable[[], str | None]) -> APIRouter:
    """/health, which needs no other process, /ready and /version. not_ready_reason: None if ready."""
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Health:
        return {"status": "ok"}

    @router.api_route("/ready", methods=["GET", "HEAD"])
    async def readiness(response: Response) -> Ready | NotReady:
        if (reason := not_ready_reason()) is None:
            return {"status": "ready"}
        response.status_code = 503
        return {"status": "not ready", "reason": reason}

    @router.get("/version")
    async def version() -> Version:
        return {"version": VERSION, "protocol": PROTOCOL_VERSION}

    return router


def metrics_router(metrics: Metrics, refresh: Callable[[], None]) -> APIRouter:
    """/metrics. refresh: updates gauges."""
    router = APIRouter()

    @router.get("/metrics")
    async def scrape() -> Response:
        refresh()
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def bind_http(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening TCP socket. Raises StartupError if the address is taken or invalid."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Two processes may bind the same port: only listening takes it.
        listener.listen(1024)
    except OSError as error:
        listener.close()
        host_is_wrong = error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror)
        raise StartupError(
            f"cannot bind the HTTP port {host}:{port}: {error.strerror}; "
            f"choose another {'--host' if host_is_wrong else flag}"
        ) from error
    except TypeError as error:
        # What Python raises for a string that cannot be a host name.
        listener.close()
        raise StartupError(f"cannot bind the HTTP port {host!r}:{port}: {error}; choose another --host") from error
    return listener


class StatusServer:
    """Serves the routes of a node's status page on a thread of its own. `refused` counts refusals by reason."""

    def __init__(
        self,
        listener: socket.socket,
        *routers: APIRouter,
        refused: Counter,
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008
    ) -> None:
        app = FastAPI(openapi_url=None)
        for router in routers:
            app.include_router(router)
        self._listener = listener
        self._server = HttpServer(app, listener, limits, refused)
        self._thread = threading.Thread(target=self._server.run, name="status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
