"""A line brings values in order, and fails with the reason if it cannot."""

import queue
import socket

from ranks.executor import RankLine
from ranks.sealed_socket import INHERITED, SealedSocket
from tests.ranks.ranks_harness import JSON


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
