"""How two ranks of different hosts show each other that they know the key of their group, and get keys of a session.

1. The connecting rank says which rank it is, to which it connects and for what, and a nonce.
2. The accepting rank answers with a nonce and a proof.
3. The connecting rank answers with a proof.
4. The accepting rank sends its clock, in the first frame of the session.

Both proofs and both keys of the session are HMAC-SHA256 by the group's key over all that 1 and 2 say but the proof, and
over the address at which the accepting rank listens, each with a label of its own. So a rank that was led to another
address, or to another rank, does not get a session; nor does what was recorded or sent back. Who only passes bytes on
learns no key, and can send nothing of its own (`SealedSocket`).
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from ranks.sealed_socket import FrameRefused, SealedSocket, SessionKeys

PATIENCE_S = 10.0
"""How long a handshake may take."""
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"<3I{_NONCE_BYTES}s")
_CLOCK = struct.Struct("<d")


class HandshakeFailed(Exception):
    """The other end does not know the key, or is not who was expected."""


class Purpose(IntEnum):
    """What a connection is for."""

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
        _check(_take(connection, _PROOF_BYTES, until), key, b"accepting", transcript)
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
        _check(_take(connection, _PROOF_BYTES, until), key, b"connecting", transcript)
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
