"""Two ranks get a session only if both know the key, and each is who the other expects."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ranks import sealed_socket
from ranks.sealed_socket import Address, Caller, FrameRefused, HandshakeFailed, Purpose, SealedSocket, accept, call

KEY = b"key"
CALLER = Caller(Purpose.LINE, rank=3, to=0)
AT: Address = ("10.0.0.1", 5000)
HELLO, ANSWER, PROOF = 44, 64, 32
"""Bytes that are sent: of the connecting rank, of the accepting one, and of the connecting one again."""


class Meeting:
    """Rank 3 connects to rank 0 by way of somebody who may do anything with what they say."""

    def __init__(self, caller: Caller = CALLER, key: bytes = KEY, led_to: Address = AT) -> None:
        calling, self.to_caller = socket.socketpair()
        self.to_accepting, accepting = socket.socketpair()
        self._threads = ThreadPoolExecutor(2)
        self.called: Future[tuple[SealedSocket, float]] = self._threads.submit(call, calling, KEY, caller, led_to)
        self.accepted: Future[tuple[Caller, SealedSocket]] = self._threads.submit(accept, accepting, key, 0, AT)

    def pass_on(self) -> None:
        """As a network does."""
        self.up(HELLO)
        self.down(ANSWER)
        self.up(PROOF)

    def up(self, size: int) -> bytes:
        return move(self.to_caller, self.to_accepting, size)

    def down(self, size: int) -> bytes:
        return move(self.to_accepting, self.to_caller, size)

    def close(self) -> None:
        for each in (self.to_caller, self.to_accepting):
            each.close()
        self._threads.shutdown()


def move(source: socket.socket, target: socket.socket, size: int) -> bytes:
    data = source.recv(size, socket.MSG_WAITALL)
    target.sendall(data)
    return data


def sessions(meeting: Meeting) -> tuple[SealedSocket, SealedSocket]:
    meeting.pass_on()
    accepted, session = meeting.accepted.result(10)
    assert accepted == CALLER
    meeting.down(44 + 8)  # the clock's frame
    return meeting.called.result(10)[0], session


def both_fail(meeting: Meeting, why: str = ".") -> None:
    with pytest.raises(HandshakeFailed, match=why):
        meeting.called.result(10)
    meeting.to_accepting.close()
    with pytest.raises(HandshakeFailed):
        meeting.accepted.result(10)
    meeting.close()


def test_ranks_that_know_the_key_get_a_session_and_compare_clocks() -> None:
    meeting = Meeting()
    calling, accepting = sessions(meeting)
    _, ahead = meeting.called.result()
    assert abs(ahead) < 1
    calling.send(b"report")
    frame = meeting.up(44 + 6)
    assert frame.endswith(b"report")
    assert accepting.receive() == b"report"
    accepting.send(b"order")
    meeting.down(44 + 5)
    assert calling.receive() == b"order"
    meeting.close()


def test_what_was_sent_in_another_session_of_the_same_ranks_is_refused() -> None:
    first, second = Meeting(), Meeting()
    calling, _ = sessions(first)
    _, accepting = sessions(second)
    calling.send(b"report")
    second.to_accepting.sendall(first.to_caller.recv(100))
    with pytest.raises(FrameRefused, match="does not come from the other end of this session"):
        accepting.receive()
    first.close()
    second.close()


@pytest.mark.parametrize(
    "meeting",
    [
        lambda: Meeting(key=b"another"),
        lambda: Meeting(led_to=("10.0.0.9", 5000)),
    ],
    ids=["another key", "a relay at another address"],
)
def test_a_rank_of_another_key_or_address_is_refused(meeting: Callable[[], Meeting]) -> None:
    made = meeting()
    made.up(HELLO)
    made.down(ANSWER)
    both_fail(made, "it has another key, or stands between")


def test_a_rank_that_was_led_to_another_rank_is_refused() -> None:
    meeting = Meeting(Caller(Purpose.LINE, rank=3, to=1))
    meeting.up(HELLO)
    with pytest.raises(HandshakeFailed, match="it wants rank 1 for purpose 2, this is rank 0"):
        meeting.accepted.result(10)
    meeting.to_caller.close()
    both_fail(meeting)


@pytest.mark.parametrize("position", [0, 4, 8, HELLO - 1, HELLO, HELLO + 32])
def test_a_handshake_in_which_a_byte_was_changed_fails(position: int) -> None:
    """Purpose, rank, addressee, both nonces and the proof."""
    meeting = Meeting()
    hello = bytearray(meeting.to_caller.recv(HELLO, socket.MSG_WAITALL))
    if position < HELLO:
        hello[position] ^= 3
    meeting.to_accepting.sendall(hello)
    answer = bytearray(meeting.to_accepting.recv(ANSWER, socket.MSG_WAITALL))
    if position >= HELLO and answer:
        answer[position - HELLO] ^= 1
    meeting.to_caller.sendall(answer)
    meeting.to_caller.shutdown(socket.SHUT_WR)
    both_fail(meeting)


def test_a_proof_that_is_sent_back_proves_nothing() -> None:
    meeting = Meeting()
    meeting.up(HELLO)
    answer = meeting.to_accepting.recv(ANSWER, socket.MSG_WAITALL)
    meeting.to_accepting.sendall(answer[32:])
    with pytest.raises(HandshakeFailed, match="it has another key"):
        meeting.accepted.result(10)
    meeting.to_caller.close()
    both_fail(meeting)


def test_a_handshake_that_was_recorded_is_refused() -> None:
    recorded = Meeting()
    hello, _, proof = recorded.up(HELLO), recorded.down(ANSWER), recorded.up(PROOF)
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(accept, theirs, KEY, 0, AT)
        ours.sendall(hello + proof)
        with pytest.raises(HandshakeFailed, match="it has another key"):
            accepted.result(10)
    ours.close()
    recorded.down(44 + 8)
    recorded.close()


def test_a_handshake_takes_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_socket, "PATIENCE_S", 0.2)
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.02):
            try:
                ours.sendall(b"\0")
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    started = time.monotonic()
    with pytest.raises(HandshakeFailed, match="timed out"):
        accept(theirs, KEY, 0, AT)
    assert time.monotonic() - started < 10
    ended.set()
    dripping.join()
    ours.close()
