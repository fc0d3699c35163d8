"""What strangers, and holders of keys, cannot do to a mailbox: floods, garbage, replays."""

import socket
import struct
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from control.codec import encode
from control.keys import load_keys
from control.messages import Cancel
from control.plane import MAX_FRAME_BYTES
from tests.control.harness import Start, Stranger, assert_serves
from tests.e2e.cluster import wait_until

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.1: signature, version, mechanism, as a client sends them."""
COMMAND = b"\x06"
"""Flags of a long command; 8 bytes of length follow."""


def test_garbage_frames_under_an_allowed_key_slow_nobody(secure: Start, keys: Path) -> None:
    gateway, decode = secure("gateway"), secure("decode")
    loaded = load_keys(keys, "prefill")
    stranger = Stranger(decode, loaded.own, loaded.cluster.public)
    good = encode(Cancel(request_id="cut"), gateway.me)
    flood = threading.Thread(
        target=lambda: [stranger.socket.send(good[: number % len(good)]) for number in range(10_000)]
    )
    flood.start()
    for _ in range(20):
        assert_serves(gateway, decode)
    flood.join()
    wait_until(lambda: decode.plane.malformed == 10_000, what="all of it to be counted")
    assert_serves(gateway, decode)
    stranger.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x01\x00\x05\x00later",
        b"\xff" + bytes(7) + b"\x01\x7f\x01\x08\x00\x00",
        GREETING.replace(b"CURVE", b"NULL\0") + b"\x04\x1a\x05READY",
        GREETING + COMMAND + struct.pack(">Q", 1 << 62),
        GREETING + COMMAND + struct.pack(">Q", 100) + b"\x05HELLO" + bytes(94),
        GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
        bytes(range(256)) * 1000,
    ],
    ids=["http", "zmtp 1", "zmtp 2", "no mechanism", "giant command", "odd hello", "hello without a key", "noise"],
)
def test_a_connection_that_is_not_ours_is_closed_and_counted(secure: Start, data: bytes) -> None:
    gateway, decode = secure("gateway"), secure("decode")
    for _ in range(5):
        with closing(socket.create_connection(("127.0.0.1", decode.port), timeout=10)) as raw, suppress(OSError):
            raw.sendall(data)
            while raw.recv(4096):
                pass
    decode.wait_refused("handshake", 5)
    assert_serves(gateway, decode)


def test_half_open_connections_are_closed_in_time(secure: Start) -> None:
    """Someone who connects and says nothing, or only half a greeting, does not keep the port busy."""
    gateway, decode = secure("gateway"), secure("decode")
    raws = [socket.create_connection(("127.0.0.1", decode.port), timeout=10) for _ in range(300)]
    for number, raw in enumerate(raws):
        raw.sendall(GREETING[: number % len(GREETING)])
    assert_serves(gateway, decode)
    for raw in raws:
        with suppress(ConnectionError):
            while raw.recv(4096):
                pass
        raw.close()
    decode.wait_refused("handshake", 300)
    assert_serves(gateway, decode)


def test_an_oversized_frame_is_never_kept(secure: Start, keys: Path) -> None:
    gateway, decode = secure("gateway"), secure("decode")
    loaded = load_keys(keys, "prefill")
    stranger = Stranger(decode, loaded.own, loaded.cluster.public)
    stranger.send(bytes(MAX_FRAME_BYTES + 1))
    stranger.send(b"garbage")
    wait_until(lambda: decode.plane.malformed == 1, what="its connection to be closed, and made again")
    assert_serves(gateway, decode)
    stranger.close()


def test_an_oversized_message_is_not_even_sent(secure: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver would close the connection, with all else that is under way on it."""
    gateway, decode = secure("gateway"), secure("decode")
    monkeypatch.setattr("control.plane.MAX_FRAME_BYTES", 1000)
    gateway.plane.send(decode.me, Cancel(request_id="r"))
    gateway.plane.send(decode.me, Cancel(request_id="next"))
    gateway.plane.send(decode.me.model_copy(update={"boot_id": "b" * 1000}), Cancel(request_id="r"))
    gateway.plane.send(decode.me, Cancel(request_id="last"))
    assert decode.take()[1] == Cancel(request_id="r")
    assert decode.take()[1] == Cancel(request_id="next")
    assert decode.take()[1] == Cancel(request_id="last")
    assert gateway.plane.undeliverable == 1
