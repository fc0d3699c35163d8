"""What a WebSocket's client may take of a server's time and memory, whatever the application does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from service.connection import ConnectionLimits
from service.websocket import GuardedWebSocket
from tests.e2e.cluster import wait_until
from tests.service.raw_http import RawClient
from tests.service.test_connections import HUGE, Served
from tests.starting import starting

MESSAGE_BYTES = 1 << 20
UPGRADE = ("Connection: Upgrade", "Upgrade: websocket")
HANDSHAKE = ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13")


class Echo(Served):
    """A server with a WebSocket that sends back what it gets, and one that sends without an end."""

    def __init__(self, **limits: float) -> None:
        super().__init__(ConnectionLimits(max_message_bytes=MESSAGE_BYTES, **limits))  # type: ignore[arg-type]

    def add_routes(self) -> None:
        self.router.add_api_websocket_route("/echo", self._echo)
        self.router.add_api_websocket_route("/flood", self._flood)

    async def _echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        async for message in websocket.iter_bytes():
            await websocket.send_bytes(message)

    async def _flood(self, websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            await websocket.send_bytes(b"x" * (1 << 16))

    @property
    def sockets(self) -> set[GuardedWebSocket]:
        connections: set[object] = {*self._connections}
        return {each for each in connections if isinstance(each, GuardedWebSocket)}


@pytest.fixture
def serve() -> Iterator[Callable[..., Echo]]:
    with starting(Echo, lambda echo: echo.server.stop()) as start:
        yield start


@contextmanager
def opened(served: Echo, path: str = "/echo") -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{served.port}{path}", proxy=None, compression=None) as connection:
        yield connection


def frame(opcode: int, data: bytes = b"", final: bool = True) -> bytes:
    """A short frame, masked with zeros."""
    return bytes([opcode | (0x80 if final else 0), 0x80 | len(data), 0, 0, 0, 0]) + data


RESET = 1006
"""What a client sees that still sends when the server closes: the reset may destroy the code."""


def closed(connection: ClientConnection) -> int:
    try:
        while True:
            connection.recv(timeout=10)
    except ConnectionClosed as error:
        return error.rcvd.code if error.rcvd else RESET


TEXT, MORE, PING = 1, 0, 9


def test_messages_in_fragments_and_between_pings_arrive_whole(serve: Callable[..., Echo]) -> None:
    with opened(serve()) as connection:
        connection.socket.sendall(
            frame(TEXT, b"ab", False) + frame(PING, b"p") + frame(MORE, b"", False) + frame(MORE, b"\xff")
        )
        assert connection.recv(timeout=10) == b"ab\xff"
        connection.send("x" * MESSAGE_BYTES)
        assert connection.recv(timeout=10) == b"x" * MESSAGE_BYTES
        assert connection.ping().wait(10)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (frame(MORE, b"", False), "malformed"),
        (frame(PING), "malformed"),
        (frame(TEXT, b"a"), "too_many_messages"),
    ],
)
def test_thousands_of_tiny_frames_end_the_connection(serve: Callable[..., Echo], part: bytes, reason: str) -> None:
    served = serve()
    with opened(served) as connection:
        connection.socket.sendall(frame(TEXT, b"a", False) + part * 5000 if part[0] == MORE else part * 5000)
        assert closed(connection) in (1008, RESET)
    assert served.refused(reason) == 1
    wait_until(lambda: not served.connections, what="the connection to close")
    assert served.is_healthy()


@pytest.mark.parametrize("message", [frame(TEXT, b"half", False), frame(TEXT, b"half")[:-1], b"\x81"])
def test_half_a_message_ends_the_connection_in_time(serve: Callable[..., Echo], message: bytes) -> None:
    served = serve(header_timeout=0.3)
    with opened(served) as connection:
        connection.send("whole")
        assert connection.recv(timeout=10) == b"whole"
        connection.socket.sendall(message)
        assert closed(connection) == 1008
    assert served.refused("body_timeout") == 1


def test_an_idle_websocket_stays_open(serve: Callable[..., Echo]) -> None:
    """Longer than a head, a body or the time between requests may take."""
    served = serve(header_timeout=0.1)
    with opened(served) as connection, pytest.raises(TimeoutError):
        connection.recv(timeout=1.5)
    wait_until(lambda: not served.connections, what="the connection to close")


@pytest.mark.parametrize("garbage", [b"\xff" * 200, frame(3), b"\x01\x05hello", b"\x81\xff" + b"\x7f" * 20])
def test_what_is_no_websocket_frame_ends_the_connection(serve: Callable[..., Echo], garbage: bytes) -> None:
    served = serve()
    with opened(served) as connection:
        connection.socket.sendall(garbage)
        assert closed(connection) in (1002, 1009)
    assert served.refused("malformed") + served.refused("body_too_large") == 1


def test_a_client_that_does_not_read_is_given_up(serve: Callable[..., Echo]) -> None:
    served = serve(reader_timeout=0.5)
    with RawClient(served.port, receive_buffer=4096) as client:
        client.get("/flood", *UPGRADE, *HANDSHAKE)
        wait_until(lambda: served.refused("reader_timeout") == 1, what="the reader to be given up")
    wait_until(lambda: not served.connections, what="the connection to close")


def test_pongs_do_not_pile_up_for_a_client_that_does_not_read(serve: Callable[..., Echo]) -> None:
    served = serve(reader_timeout=30.0)
    with RawClient(served.port, receive_buffer=4096) as client:
        client.get("/flood", *UPGRADE, *HANDSHAKE)
        wait_until(lambda: any(not each.writable.is_set() for each in served.sockets), what="full buffers")
        client.send(frame(PING, b"p" * 125) * (HUGE // 131))
        [socket] = served.sockets
        assert socket.transport.get_write_buffer_size() < HUGE // 8


@pytest.mark.parametrize(("head", "answer"), [((), "HTTP/1.1 400"), (("Content-Length: 5",), "")])
def test_a_handshake_that_is_none_is_refused(serve: Callable[..., Echo], head: Sequence[str], answer: str) -> None:
    served = serve()
    with RawClient(served.port) as client:
        client.get("/echo", *UPGRADE, *head)
        assert client.rest()[: len("HTTP/1.1 400")] == answer
    assert served.refused("malformed") == 1
    wait_until(lambda: not served.connections, what="the connection to close")


def test_a_server_without_websockets_answers_plain_http() -> None:
    served = Served(ConnectionLimits())
    with RawClient(served.port) as client:
        client.get("/health", *UPGRADE)
        assert client.answer().startswith("HTTP/1.1 200")
    served.server.stop()
