"""Of a session only frames count that the other end has made, each once and in order; lines fail with the reason."""

import pickle
import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from ranks.executor import RankLine
from ranks.sealed_socket import INHERITED, MOST_BYTES, FrameRefused, SealedSocket, SessionKeys
from tests.ranks.ranks_harness import JSON

HEADER, TAG = 12, 32
KEYS = SessionKeys(b"a" * 32, b"b" * 32)
OTHER_KEYS = SessionKeys(b"c" * 32, b"d" * 32)


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


def with_length(frame: bytes, length: int, payload: bytes) -> bytes:
    return frame[: HEADER - 4] + length.to_bytes(4, "little") + payload


Attack = Callable[[list[bytes], bytes], bytes]
"""What comes instead of the first of these frames. The second argument: a frame that the attacked end has sent."""
NOT_OF_IT = "frame 0 does not come from the other end of this session"
READ = pickle.dumps(Opened())


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        pytest.param(lambda sent, own: with_length(sent[0], len(READ), bytes(TAG) + READ), NOT_OF_IT, id="injected"),
        pytest.param(lambda sent, own: sent[0][:-1] + bytes([sent[0][-1] ^ 1]), NOT_OF_IT, id="changed"),
        pytest.param(lambda sent, own: bytes(HEADER - 4) + sent[1][HEADER - 4 :], NOT_OF_IT, id="renumbered"),
        pytest.param(lambda sent, own: with_length(sent[0], 1, sent[0][HEADER:-1]), NOT_OF_IT, id="shortened"),
        pytest.param(lambda sent, own: own, NOT_OF_IT, id="reflected"),
        pytest.param(lambda sent, own: frames(OTHER_KEYS, b"first")[0], NOT_OF_IT, id="of another session"),
        pytest.param(lambda sent, own: sent[1], "frame 1 came, expected frame 0", id="left out"),
        pytest.param(lambda sent, own: sent[1] + sent[0], "frame 1 came, expected frame 0", id="reordered"),
        pytest.param(
            lambda sent, own: with_length(sent[0], MOST_BYTES + 1, sent[0][HEADER:]),
            f"more than {MOST_BYTES}",
            id="too long",
        ),
    ],
)
def test_what_the_other_end_has_not_sent_next_is_refused(receiving: Receiving, attack: Attack, reason: str) -> None:
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


def test_a_line_on_which_something_else_comes_fails_with_the_reason() -> None:
    ours, theirs = socket.socketpair()
    heard: list[object] = []
    failed: queue.SimpleQueue[str] = queue.SimpleQueue()
    RankLine(SealedSocket(ours, INHERITED), 1, JSON, heard.append, failed.put)
    theirs.sendall(bytes(100))
    reason = "frame 0 does not come from the other end of this session; the connection is closed"
    assert failed.get(timeout=10) == f"the line to rank 1 failed: {reason}"
    assert theirs.recv(1) == b"", "it is closed"
    assert heard == []
    theirs.close()


def test_a_line_whose_values_are_none_fails_with_the_reason() -> None:
    ours, theirs = socket.socketpair()
    failed: queue.SimpleQueue[str] = queue.SimpleQueue()
    RankLine(SealedSocket(ours, INHERITED), 1, JSON, lambda _: None, failed.put)
    SealedSocket(theirs, INHERITED).send(b"no JSON")
    assert "Expecting value" in failed.get(timeout=10)


def test_a_line_that_cannot_send_a_value_fails_with_the_reason() -> None:
    ours, theirs = socket.socketpair()
    failed: queue.SimpleQueue[str] = queue.SimpleQueue()
    RankLine(SealedSocket(ours, INHERITED), 1, JSON, lambda _: None, failed.put).send(object())
    assert failed.get(timeout=10).startswith(
        "the line to rank 1 failed: cannot send: Object of type object is not JSON"
    )
    assert theirs.recv(1) == b"", "it is closed"
    theirs.close()
