"""Frames between two ranks that nobody else can make, change, repeat, reorder or send back, and how they get the keys.

A frame is a header (sequence number, length of the payload), an HMAC-SHA256 over header and payload, and the payload.
Each direction of each connection has a key of its own, so a frame of another session or direction does not verify.
Payloads are not encrypted. A payload is handed on only after its frame was verified.

The handshake shows two ranks of different hosts that both know the key of their group:

1. The connecting rank says which rank it is, to which it connects and for what, and a nonce.
2. The accepting rank answers with a nonce and a proof.
3. The connecting rank answers with a proof.
4. The accepting rank sends its clock, in the first frame of the session.

Both proofs and both keys of the session are HMAC-SHA256 by the group's key over all that 1 and 2 say but the proof, and
over the address at which the accepting rank listens, each with a label of its own. So a rank that was led to another
address, or to another rank, does not get a session; nor does what was recorded or sent back. A process that only relays
bytes learns no key, and cannot send frames of its own.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NoReturn

_HEADER = struct.Struct("<QI")
_TAG_BYTES = hashlib.sha256().digest_size
_TIMEVAL = struct.Struct("@ll")
MOST_BYTES = 256 << 20
"""Of a payload. The longest are the orders of a step of prompts with millions of tokens, some tens of MB."""


class FrameRefused(Exception):
    """The received bytes are not the next frame of the session. They were not used, and the connection is closed."""


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
        """From now on `receive` fails with BlockingIOError after `seconds` without a byte; 0: never."""
        whole = int(seconds)
        timeval = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def shut_down(self) -> None:
        """End the connection; a thread that waits in `receive` gets an EOFError."""
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


PATIENCE_S = 10.0
"""How long a handshake may take."""
_NONCE_BYTES = 32
_HELLO = struct.Struct(f"<3I{_NONCE_BYTES}s")
_CLOCK = struct.Struct("<d")


class HandshakeFailed(Exception):
    """The other end does not know the key, or is not who was expected."""


class Purpose(IntEnum):
    LINK = 1
    """It keeps two tables alike (`ReplicatedStatus`)."""
    LINE = 2
    """It brings orders and reports (`RankLine`)."""


@dataclass(frozen=True)
class Caller:
    """A rank that connects, for a purpose, to rank `to`."""

    purpose: Purpose
    rank: int
    to: int


Address = tuple[str, int]


def call(connection: socket.socket, key: bytes, caller: Caller, at: Address) -> tuple[SealedSocket, float]:
    """Get a session with the rank that listens at an address. Returns, too, by how much its clock is ahead.

    Raises HandshakeFailed, and closes the connection.
    """
    until = time.monotonic() + PATIENCE_S
    try:
        hello = _HELLO.pack(caller.purpose, caller.rank, caller.to, secrets.token_bytes(_NONCE_BYTES))
        connection.sendall(hello)
        transcript = _transcript(hello, _take(connection, _NONCE_BYTES, until), at)
        _check(_take(connection, _TAG_BYTES, until), key, b"accepting", transcript)
        asked_at = time.monotonic()
        connection.sendall(_derived(key, b"connecting", transcript))
        session = SealedSocket(connection, _keys(key, transcript, is_caller=True))
        session.be_patient(PATIENCE_S)
        connection.settimeout(None)
        [theirs] = _CLOCK.unpack(session.receive())
        return session, theirs - (asked_at + time.monotonic()) / 2
    except (HandshakeFailed, FrameRefused, EOFError, OSError, struct.error) as error:
        connection.close()
        raise HandshakeFailed(str(error) or "the connection was closed") from error


def accept(connection: socket.socket, key: bytes, rank: int, at: Address) -> tuple[Caller, SealedSocket]:
    """Get a session with the rank that has connected to this one, which listens at an address.

    Raises HandshakeFailed, and closes the connection.
    """
    until = time.monotonic() + PATIENCE_S
    try:
        hello = _take(connection, _HELLO.size, until)
        purpose, caller, to, _ = _HELLO.unpack(hello)
        if purpose not in list(Purpose) or to != rank:
            raise HandshakeFailed(f"it wants rank {to} for purpose {purpose}, this is rank {rank}")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        transcript = _transcript(hello, nonce, at)
        connection.sendall(nonce + _derived(key, b"accepting", transcript))
        _check(_take(connection, _TAG_BYTES, until), key, b"connecting", transcript)
        connection.settimeout(None)
        session = SealedSocket(connection, _keys(key, transcript, is_caller=False))
        session.send(_CLOCK.pack(time.monotonic()))
        return Caller(Purpose(purpose), caller, to), session
    except (HandshakeFailed, OSError) as error:
        connection.close()
        raise HandshakeFailed(str(error)) from error


def _take(connection: socket.socket, size: int, until: float) -> bytes:
    """So many bytes, until then."""
    taken = b""
    while len(taken) < size:
        connection.settimeout(max(1e-3, until - time.monotonic()))
        more = connection.recv(size - len(taken))
        if not more:
            raise HandshakeFailed("the connection was closed")
        taken += more
    return taken


def _transcript(hello: bytes, nonce: bytes, at: Address) -> bytes:
    return hello + nonce + f"{at[0]}:{at[1]}".encode()


def _check(proof: bytes, key: bytes, label: bytes, transcript: bytes) -> None:
    if not hmac.compare_digest(proof, _derived(key, label, transcript)):
        raise HandshakeFailed("it has another key, or stands between this rank and the one that it speaks for")


def _keys(key: bytes, transcript: bytes, is_caller: bool) -> SessionKeys:
    to_accepting = _derived(key, b"frames to the accepting rank", transcript)
    to_connecting = _derived(key, b"frames to the connecting rank", transcript)
    return SessionKeys(to_accepting, to_connecting) if is_caller else SessionKeys(to_connecting, to_accepting)


def _derived(key: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + transcript, hashlib.sha256)
