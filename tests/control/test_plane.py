"""Mailboxes over real ZeroMQ sockets."""

import math
import queue
import time

import pytest
import structlog

from control import connections
from control.codec import encode
from control.messages import Cancel, Leaving, Message, Peer, Pong
from control.plane import ControlPlane
from tests.control.harness import Start, Stranger
from tests.e2e.cluster import wait_until

Inbox = queue.SimpleQueue[tuple[Peer, Message]]
WORD = Cancel(request_id="word")
"""What any gateway may say."""


def test_a_repeated_message_is_sent_until_answered(start: Start) -> None:
    (a, _), (b, inbox) = start(), start()
    a.repeat("key", b.me, Cancel(request_id="r"), every=0.05)
    for _ in range(3):
        inbox.get(timeout=5)
    a.answered("key")
    a.send(b.me, Cancel(request_id="last"))
    while inbox.get(timeout=5)[1] != Cancel(request_id="last"):
        pass
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.3)


def test_a_message_for_a_dead_boot_is_not_acted_on(start: Start) -> None:
    """What was queued for a process does not reach the one that took its address."""
    a, _ = start()
    first, _ = start()
    dead = first.me
    first.stop()
    a.send(dead, Cancel(request_id="old"))
    second, inbox = start(port=int(dead.address.rsplit(":", 1)[1]))
    a.send(second.me, Cancel(request_id="new"))
    assert inbox.get(timeout=10) == (a.me, Cancel(request_id="new"))


def test_whoever_has_the_address_may_answer_if_the_sender_says_so(start: Start) -> None:
    a, _ = start()
    b, inbox = start()
    a.send(b.me.model_copy(update={"boot_id": "another"}), WORD, any_boot=True)
    assert inbox.get(timeout=5) == (a.me, WORD)


def test_garbage_is_counted_and_harms_nobody(start: Start) -> None:
    (a, _), (b, inbox) = start(), start()
    stranger = Stranger(b)
    good = encode(Cancel(request_id="r"), a.me)
    for junk in (b"", b"\xff" * 100, good[:-3], b"\x93\x01\x02\x03", b"\x81" * 5000):
        stranger.send(junk)
    stranger.socket.send_multipart([b"several", b"parts"])
    stranger.send(good)
    assert inbox.get(timeout=5) == (a.me, Cancel(request_id="r"))
    assert b.malformed == 7
    stranger.close()


def test_a_peer_that_names_an_impossible_address_costs_nothing(start: Start) -> None:
    (a, _), (b, inbox) = start(), start()
    for address in ("no-such-host.invalid:1", "127.0.0.1:99999", "a-:0", "a..b:1", "a" * 64 + ":1"):
        a.send(Peer(role="decode", address=address, boot_id="x"), WORD)
    a.send(b.me, WORD)
    assert inbox.get(timeout=5) == (a.me, WORD)


def test_a_command_that_fails_costs_nothing_else(start: Start) -> None:
    a, inbox = start()

    def broken() -> None:
        raise RuntimeError("a bug")

    a._hand_over(broken)
    a.repeat("key", a.me, None)  # type: ignore[arg-type]
    a.send(a.me, Cancel(request_id="next"))
    while inbox.get(timeout=5)[1] != Cancel(request_id="next"):
        pass
    a.check()


def test_a_handler_that_fails_costs_only_its_message() -> None:
    inbox: Inbox = queue.SimpleQueue()

    def deliver(peer: Peer, message: Message) -> None:
        if message == Cancel(request_id="bad"):
            raise RuntimeError("a bug")
        inbox.put((peer, message))

    plane = ControlPlane("gateway", "127.0.0.1", 0, "127.0.0.1", deliver)
    plane.start()
    plane.send(plane.me, Cancel(request_id="bad"))
    plane.send(plane.me, Cancel(request_id="good"))
    assert inbox.get(timeout=5)[1] == Cancel(request_id="good")
    plane.stop()


def test_a_plane_that_was_never_started_gives_its_port_back(start: Start) -> None:
    unused = ControlPlane("decode", "127.0.0.1", 0, "127.0.0.1", lambda peer, message: None)
    unused.stop()
    unused.stop()
    plane, _ = start(port=int(unused.me.address.rsplit(":", 1)[1]))
    assert plane.me.address == unused.me.address


def test_a_watched_process_answers_although_nobody_reads_its_inbox(start: Start) -> None:
    (a, _), (b, _) = start("decode"), start("prefill")
    assert a.silence(b.me) == math.inf
    a.watch([b.me])
    first = wait_until(lambda: a.alive_after(b.me.boot_id), what="an answer")
    wait_until(lambda: (a.alive_after(b.me.boot_id) or 0) > first, what="the next one")
    assert a.silence(b.me) < time.monotonic() - first


def test_watching_shows_that_another_boot_has_the_address(start: Start) -> None:
    (a, _), (b, _) = start("decode"), start("prefill")
    asked_after = time.monotonic()
    a.watch([b.me.model_copy(update={"boot_id": "the one before"})])
    answer = wait_until(lambda: a.answer_at(b.me.address), what="an answer")
    assert answer.boot_id == b.me.boot_id
    assert answer.asked_at > asked_after
    assert a.alive_after("the one before") is None


def test_what_a_process_said_before_it_died_is_no_sign_of_life(start: Start) -> None:
    """It is read late by one that was stopped meanwhile, and so is the answer to a ping from before."""
    a, inbox = start("prefill")
    dead = Peer(role="decode", address="127.0.0.1:9", boot_id="dead")
    stranger = Stranger(a)
    ping = a._liveness.ask(dead.address)
    asked_at = time.monotonic()
    for late in (Leaving(), Pong(nonce=ping.nonce), Pong(nonce=ping.nonce + 1), Leaving()):
        stranger.send(encode(late, dead))
    for _ in range(2):
        inbox.get(timeout=5)
    read_at = time.monotonic()
    assert (a.last_heard("dead") or 0) > asked_at
    assert a.silence(dead) > read_at - asked_at, "it counts from when the ping was sent"
    assert (a.alive_after("dead") or 0) < asked_at
    stranger.close()


def test_a_connection_that_sat_idle_and_was_closed_works_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang 9266: requests failed after hours of idleness."""
    monkeypatch.setattr(connections, "IDLE_CLOSE_S", 0.0)
    (a, _), (b, b_inbox), (c, c_inbox) = start(), start(), start()
    a.send(b.me, WORD)
    assert b_inbox.get(timeout=5) == (a.me, WORD)
    a.send(c.me, WORD)
    assert c_inbox.get(timeout=5) == (a.me, WORD)
    assert list(a._connections._by_address) == [c.me.address], "the idle connection was closed"
    a.send(b.me, WORD)
    assert b_inbox.get(timeout=5) == (a.me, WORD)


def test_what_waits_for_a_deaf_peer_is_bounded_and_said_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_QUEUED", 10)
    plane, inbox = start()
    dead = Peer(role="prefill", address="127.0.0.1:9", boot_id="dead")

    def flood() -> int:
        """How often it is complained of while fifty messages find no taker."""
        with structlog.testing.capture_logs() as logs:
            for _ in range(50):
                plane.send(dead, WORD)
            plane.send(plane.me, WORD)
            inbox.get(timeout=5)
        return [line["event"] for line in logs].count("undeliverable")

    assert (flood(), plane.undeliverable) == (1, 40)
    assert flood() == 0
    stranger = Stranger(plane)
    stranger.send(encode(Leaving(), dead))
    inbox.get(timeout=5)
    stranger.close()
    assert flood() == 1
