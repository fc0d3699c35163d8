"""Of the frames of a session only those count that the other end has made, each once and in its order."""

import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from ranks.sealed_socket import MOST_BYTES, FrameRefused, SealedSocket, SessionKeys

HEADER, TAG = 12, 32
KEYS = SessionKeys(b"a" * 32, b"b" * 32)


def other_end(keys: SessionKeys) -> SessionKeys:
    return SessionKeys(keys.receiving, keys.sending)


def frames(keys: SessionKeys, *payloads: bytes) -> list[bytes]:
    """What one end puts on the network."""
    out, network = socket.socketpair()
    with out, network:
        sealed = SealedSocket(out, keys)
        found = []
        for payload in payloads:
            sealed.send(payload)
            found.append(network.recv(1 << 16))
        return found


class Receiving:
    """An end of a session, and what the network does to it."""

    def __init__(self) -> None:
        own, self.network = socket.socketpair()
        self.end = SealedSocket(own, KEYS)

    def close(self) -> None:
        self.end.close()
        self.network.close()


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    made = Receiving()
    yield made
    made.close()


class Opened:
    """Its pickle says that it was read."""

    was_read = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return read, ()


def read() -> None:
    Opened.was_read = True


def injected(sent: list[bytes], own: bytes) -> bytes:
    payload = pickle.dumps(Opened())
    return sent[0][:8] + len(payload).to_bytes(4, "little") + bytes(TAG) + payload


def changed(sent: list[bytes], own: bytes) -> bytes:
    return sent[0][:-1] + bytes([sent[0][-1] ^ 1])


def renumbered(sent: list[bytes], own: bytes) -> bytes:
    return bytes(HEADER - 4) + sent[1][HEADER - 4 :]


def shortened(sent: list[bytes], own: bytes) -> bytes:
    return sent[0][:8] + (1).to_bytes(4, "little") + sent[0][12:-1]


def reflected(sent: list[bytes], own: bytes) -> bytes:
    return own


def of_another_session(sent: list[bytes], own: bytes) -> bytes:
    return frames(SessionKeys(b"c" * 32, b"d" * 32), b"first")[0]


def left_out(sent: list[bytes], own: bytes) -> bytes:
    return sent[1]


def reordered(sent: list[bytes], own: bytes) -> bytes:
    return sent[1] + sent[0]


def too_long(sent: list[bytes], own: bytes) -> bytes:
    return sent[0][:8] + (MOST_BYTES + 1).to_bytes(4, "little") + sent[0][12:]


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (injected, "frame 0 does not come from the other end of this session"),
        (changed, "frame 0 does not come from the other end of this session"),
        (renumbered, "frame 0 does not come from the other end of this session"),
        (shortened, "frame 0 does not come from the other end of this session"),
        (reflected, "frame 0 does not come from the other end of this session"),
        (of_another_session, "frame 0 does not come from the other end of this session"),
        (left_out, "frame 1 came, expected frame 0"),
        (reordered, "frame 1 came, expected frame 0"),
        (too_long, f"more than {MOST_BYTES}"),
    ],
)
def test_what_the_other_end_has_not_sent_next_is_refused(
    receiving: Receiving, attack: Callable[[list[bytes], bytes], bytes], reason: str
) -> None:
    sent = frames(other_end(KEYS), b"first", b"again")
    [own] = frames(KEYS, b"first")
    receiving.network.sendall(attack(sent, own))
    with pytest.raises(FrameRefused, match=reason):
        receiving.end.receive()
    assert not Opened.was_read
    with suppress(ConnectionResetError):  # The kernel may say that bytes were left unread.
        assert receiving.network.recv(1) == b"", "the connection is closed"


def test_a_frame_that_is_repeated_is_refused(receiving: Receiving) -> None:
    [first] = frames(other_end(KEYS), b"first")
    receiving.network.sendall(first + first)
    assert receiving.end.receive() == b"first"
    with pytest.raises(FrameRefused, match="frame 0 came, expected frame 1"):
        receiving.end.receive()


@pytest.mark.parametrize("kept", [1, HEADER, HEADER + TAG, HEADER + TAG + 1])
def test_a_frame_that_is_cut_is_refused(receiving: Receiving, kept: int) -> None:
    [first] = frames(other_end(KEYS), b"first")
    receiving.network.sendall(first[:kept])
    receiving.network.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameRefused, match="the connection ended within frame 0"):
        receiving.end.receive()


def test_a_connection_that_ends_between_frames_has_ended_in_peace(receiving: Receiving) -> None:
    receiving.network.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        receiving.end.receive()


def test_who_is_silent_for_too_long_is_not_waited_for(receiving: Receiving) -> None:
    receiving.end.be_patient(0.01)
    with pytest.raises(BlockingIOError):
        receiving.end.receive()


def test_both_ends_of_a_session_hear_each_other_in_order() -> None:
    ours, theirs = socket.socketpair()
    first, second = SealedSocket(ours, KEYS), SealedSocket(theirs, other_end(KEYS))
    for payload in (b"", b"one", bytes(range(256)) * 100):
        first.send(payload)
        second.send(payload + b"!")
        assert second.receive() == payload
        assert first.receive() == payload + b"!"
    first.close()
    second.close()


def test_keys_are_in_no_text() -> None:
    assert "aaaa" not in repr(KEYS)
