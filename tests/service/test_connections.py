"""What a server's connections may take of its time, its memory and its file descriptors."""

import ssl
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import trustme
from fastapi import Response

from base.metrics import Metrics
from service import http_server, status
from service.connection import ConnectionLimits, GuardedConnection
from service.http_server import HttpServer
from service.status import StatusServer, bind_http, status_router
from tests.e2e.cluster import wait_until
from tests.service.raw_http import RawClient
from tests.starting import starting

HUGE = 8 << 20
"""More than the kernel buffers of a connection hold."""
KEEP_ALIVE_S = 1


class Served:
    """A status server with short deadlines, and a route with a huge answer."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.metrics = Metrics()
        self.hellos = 0
        self.router = router = status_router(lambda: None)
        router.add_api_route("/huge", lambda: Response(b"x" * HUGE), methods=["GET"])
        router.add_api_route("/hello", self._hello, methods=["POST"])
        self.add_routes()
        listener = bind_http("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.server = StatusServer(listener, router, refused=self.metrics.http_refused, limits=limits)
        # uvicorn's, 5 s in the service: here too it is longer than what the tests allow for a head.
        self.server._server.config.timeout_keep_alive = KEEP_ALIVE_S
        self.server.start()

    def add_routes(self) -> None:
        """For servers that have more."""

    async def _hello(self) -> str:
        """Reads nothing of its body."""
        self.hellos += 1
        return "hello"

    def refused(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("hisparse_pd_http_refused_total", {"reason": reason}) or 0.0

    def is_healthy(self, tls: ssl.SSLContext | None = None) -> bool:
        with RawClient(self.port, tls) as client:
            client.get("/health")
            return client.answer().startswith("HTTP/1.1 200")

    def writable(self) -> bool:
        return all(connection.flow._is_writable_event.is_set() for connection in self._connections)

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def _connections(self) -> set[GuardedConnection]:
        return self.server._server.server_state.connections.copy()  # type: ignore[return-value]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with starting(Served, lambda served: served.server.stop()) as start:
        yield lambda **limits: start(ConnectionLimits(**limits))


def test_a_head_that_is_not_complete_in_time_ends_the_connection(serve: Callable[..., Served]) -> None:
    served = serve(header_timeout=0.3)
    with RawClient(served.port) as client:
        client.send("GET /health HTTP/1.1\r\nHost:")
        answer = client.rest()
    assert answer.startswith("HTTP/1.1 408 Request Timeout\r\n")
    assert '"code": "request_timeout"' in answer
    assert served.refused("header_timeout") == 1


def test_a_connection_between_requests_has_the_keep_alive_time(serve: Callable[..., Served]) -> None:
    """Longer than a head may take. It is no refusal."""
    served = serve(header_timeout=0.2)
    with RawClient(served.port) as client:
        client.get("/health")
        assert client.answer().startswith("HTTP/1.1 200")
        assert client.rest() == ""
    assert served.refused("header_timeout") == 0


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_stops_half_way_ends_the_connection(serve: Callable[..., Served], framing: str) -> None:
    served = serve(header_timeout=0.3)
    with RawClient(served.port) as client:
        client.post("/hello", framing, body="5\r\nhello\r\n")
        client.rest()
    assert served.refused("body_timeout") == 1


def test_what_is_not_http_is_counted_and_refused(serve: Callable[..., Served]) -> None:
    served = serve()
    for garbage in (b"\x16\x03\x01\x02\x00" * 10 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000):
        with RawClient(served.port) as client:
            client.send(garbage)
            assert client.rest().startswith("HTTP/1.1 400")
    assert served.refused("malformed") == 2


@pytest.mark.parametrize("path", ["/hello", "/nothing"])
def test_a_body_in_a_great_many_tiny_chunks_is_not_parsed_to_its_end(serve: Callable[..., Served], path: str) -> None:
    served = serve()
    with RawClient(served.port) as client:
        client.post(path, "Transfer-Encoding: chunked", body="1\r\nx\r\n" * 10_000)
        assert client.rest().startswith("HTTP/1.1 ")
    assert served.refused("malformed") == 1


def test_an_error_after_the_answer_ends_quietly(
    serve: Callable[..., Served], capfd: pytest.CaptureFixture[str]
) -> None:
    served = serve()
    with RawClient(served.port) as client:
        client.post("/hello", "Transfer-Encoding: chunked")
        assert client.answer().startswith("HTTP/1.1 200")
        client.send("no chunk\r\n")
        assert client.rest() == ""
    assert served.refused("malformed") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_that_nobody_asked_for_is_not_read_to_its_end(serve: Callable[..., Served]) -> None:
    served = serve()
    more_than_is_read = b"x" * (64 << 20)
    with RawClient(served.port) as client:
        client.post("/hello", f"Content-Length: {1 << 40}")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.send(more_than_is_read)
    assert served.hellos == 1


def test_an_early_answer_reaches_a_client_that_still_sends(serve: Callable[..., Served]) -> None:
    served = serve()
    with RawClient(served.port) as client:
        client.post("/hello", "Transfer-Encoding: chunked")
        for _ in range(4):
            client.send("10000\r\n" + "x" * 65536 + "\r\n")
        assert client.rest().startswith("HTTP/1.1 200")


def test_a_client_that_does_not_read_its_answer_is_given_up(serve: Callable[..., Served]) -> None:
    served = serve(reader_timeout=0.5)
    with RawClient(served.port, receive_buffer=4096) as client:
        client.get("/huge")
        wait_until(lambda: served.refused("reader_timeout") == 1, what="the reader to be given up")
        wait_until(lambda: served.connections == 0, what="the connection to be gone")
    assert served.is_healthy()


def test_a_slow_reader_that_goes_on_reading_gets_everything(serve: Callable[..., Served]) -> None:
    served = serve(reader_timeout=20.0)
    with RawClient(served.port) as client:
        client.get("/huge")
        wait_until(lambda: not served.writable(), what="the server to wait for its reader")
        assert len(client.answer()) > HUGE
    assert served.refused("reader_timeout") == 0


def test_a_server_stops_while_clients_dribble(serve: Callable[..., Served]) -> None:
    served = serve()
    clients = [RawClient(served.port) for _ in range(5)]
    for client in clients:
        client.send("GET /health HTTP/1.1\r\nX-Slow:")
    wait_until(lambda: served.connections == 5, what="the connections")
    served.server.stop()
    assert not served.server._thread.is_alive()
    for client in clients:
        client.rest()
        client.socket.close()


@pytest.fixture
def serve_tls(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    """The same over TLS, which only gateways have."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    monkeypatch.setattr(status, "HttpServer", partial(HttpServer, tls=lambda: context))
    monkeypatch.setattr(http_server, "_TLS_SHUTDOWN_S", 0.5)
    return serve


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_handshakes_count_as_connections_and_have_a_deadline(serve_tls: Callable[..., Served]) -> None:
    served = serve_tls(max_connections=3, header_timeout=0.5)
    silent = [RawClient(served.port) for _ in range(3)]
    with RawClient(served.port) as fourth:
        assert fourth.rest() == ""
    assert served.refused("too_many_connections") == 1
    for client in silent:
        assert client.rest() == ""
        client.socket.close()
    wait_until(lambda: served.refused("tls_handshake") == 3, what="the handshakes to be given up")
    assert served.is_healthy(trusting())


def test_a_connection_over_tls_has_the_same_deadlines(serve_tls: Callable[..., Served]) -> None:
    served = serve_tls(header_timeout=0.5, reader_timeout=0.5)
    with RawClient(served.port, tls=trusting()) as client:
        client.send("GET /hea")
        assert client.rest().startswith("HTTP/1.1 408")
    with RawClient(served.port, tls=trusting(), receive_buffer=4096) as client:
        client.get("/huge")
        wait_until(lambda: served.refused("reader_timeout") == 1, what="the reader to be given up")
    wait_until(lambda: served.connections == 0, what="the connections to be gone")
