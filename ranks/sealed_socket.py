"""Frames between two ranks that nobody else can make, change, repeat, reorder or send back.

A frame is a header (sequence number, length of the payload), an HMAC-SHA256 over header and payload, and the payload.
Each direction of each connection has a key of its own, so a frame of another session or direction does not verify.
Payloads are not encrypted. A payload is handed on only after its frame was verified.
"""

import hashlib
import hmac
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

_HEADER = struct.Struct("<QI")
_TAG_BYTES = hashlib.sha256().digest_size
_TIMEVAL = struct.Struct("@ll")
MOST_BYTES = 256 << 20
"""Of a payload. The longest are the orders of a step of prompts with millions of tokens, some tens of MB."""


class FrameRefused(Exception):
    """What came is not the next frame of the session. The connection is closed, and nothing of it was used."""


@dataclass(frozen=True)
class SessionKeys:
    """The keys of one connection at one of its ends, one for each direction."""

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)


INHERITED = SessionKeys(b"", b"")
"""Of a pair of sockets that both ranks inherit: no other process can send there."""


class SealedSocket:
    """One end of a connection. One thread at a time sends, and one receives."""

    def __init__(self, connection: socket.socket, keys: SessionKeys) -> None:
        """connection: blocking; its owner is this object."""
        self._connection = connection
        self._keys = keys
        self._sent = 0
        self._received = 0

    def send(self, payload: bytes) -> None:
        """Raises OSError if the connection has ended, and ValueError if the payload is too long."""
        if len(payload) > MOST_BYTES:
            raise ValueError(f"a frame of {len(payload)} bytes, at most {MOST_BYTES} can be sent")
        header = _HEADER.pack(self._sent, len(payload))
        self._sent += 1
        self._connection.sendall(b"".join((header, _tag(self._keys.sending, header, payload), payload)))

    def receive(self) -> bytes:
        """The next payload.

        Raises FrameRefused; EOFError if the other end has closed the connection between frames; OSError if it was lost,
        of which BlockingIOError after the seconds of `be_patient` without a byte.
        """
        head = self._take(_HEADER.size + _TAG_BYTES, is_first=True)
        header, tag = head[: _HEADER.size], head[_HEADER.size :]
        sequence, length = _HEADER.unpack(header)
        if length > MOST_BYTES:
            self._refuse(f"a frame says that it has {length} bytes, more than {MOST_BYTES}")
        payload = self._take(length)
        if not hmac.compare_digest(tag, _tag(self._keys.receiving, header, payload)):
            self._refuse(f"frame {self._received} does not come from the other end of this session")
        if sequence != self._received:
            self._refuse(f"frame {sequence} came, expected frame {self._received}: one was repeated, lost or reordered")
        self._received += 1
        return payload

    def be_patient(self, seconds: float) -> None:
        """From now on `receive` fails with BlockingIOError after so many seconds without a byte; 0: never."""
        whole = int(seconds)
        timeval = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def shut_down(self) -> None:
        """End the connection; whoever waits in `receive` gets an EOFError."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _take(self, size: int, is_first: bool = False) -> bytes:
        """So many bytes. Their memory is taken as they come, not as a header promises."""
        taken = bytearray()
        while len(taken) < size:
            more = self._connection.recv(min(size - len(taken), 1 << 20))
            if not more and is_first and not taken:
                raise EOFError
            if not more:
                self._refuse(f"the connection ended within frame {self._received}")
            taken += more
        return bytes(taken)

    def _refuse(self, why: str) -> NoReturn:
        self.shut_down()
        raise FrameRefused(f"{why}; the connection is closed")


def _tag(key: bytes, header: bytes, payload: bytes) -> bytes:
    mac = hmac.new(key, header, hashlib.sha256)
    mac.update(payload)
    return mac.digest()
