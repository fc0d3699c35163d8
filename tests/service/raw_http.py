"""A client that speaks HTTP by hand, and as badly as a test wants."""

import re
import socket
import ssl
import time
from types import TracebackType
from typing import Self


class RawClient:
    def __init__(self, port: int, tls: ssl.SSLContext | None = None, receive_buffer: int | None = None) -> None:
        plain = socket.socket()
        if receive_buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.settimeout(20)
        plain.connect(("127.0.0.1", port))
        self.socket = plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def send(self, text: str | bytes) -> None:
        self.socket.sendall(text.encode() if isinstance(text, str) else text)

    def post(self, path: str, *headers: str, body: str = "") -> None:
        """Sends a head and what there is of a body."""
        self.send("\r\n".join([f"POST {path} HTTP/1.1", "Host: test", *headers, "", body]))

    def get(self, path: str, *headers: str) -> None:
        self.send("\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *headers, "", ""]))

    def rest(self) -> str:
        """Everything until the other side closes the connection."""
        received = b""
        while True:
            try:
                part = self.socket.recv(1 << 16)
            except ConnectionResetError:
                part = b""
            if not part:
                return received.decode()
            received += part

    def answer(self) -> str:
        """One answer whose length is declared."""
        received = bytearray()
        whole = None
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if whole is None and (end := received.find(b"\r\n\r\n")) >= 0:
                declared = re.search(rb"\r\ncontent-length: (\d+)\r\n", received[: end + 4], re.IGNORECASE)
                assert declared is not None
                whole = end + 4 + int(declared[1])
            if whole is not None and len(received) >= whole:
                return received.decode()
            part = self.socket.recv(1 << 16)
            assert part, f"the connection closed after {received[:1000]!r}"
            received += part
        raise AssertionError(f"no whole answer: {received[:1000]!r}")
