"""Mailboxes with keys, over real sockets: who has none gets nothing through, and slows nobody down."""

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from structlog.testing import CapturingLogger

from control import access, connections
from control.codec import encode
from control.keys import KeyPair, Keys, generate, generate_node, load_keys
from control.messages import Cancel, Leaving, Message, Peer, Role
from control.plane import MAX_FRAME_BYTES, ControlPlane
from tests.e2e.cluster import wait_until

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.1: signature, version, mechanism, as a client sends them."""
COMMAND = b"\x06"
"""Flags of a long command; 8 bytes of length follow."""


@dataclass
class Mailbox:
    plane: ControlPlane
    inbox: "queue.SimpleQueue[tuple[Peer, Message]]"

    @property
    def me(self) -> Peer:
        return self.plane.me

    @property
    def port(self) -> int:
        return int(self.me.address.rpartition(":")[2])

    def take(self) -> tuple[Peer, Message]:
        return self.inbox.get(timeout=10)

    def wait_refused(self, reason: str, number: int = 1) -> None:
        wait_until(lambda: self.plane.refused[reason] >= number, what=f"{number} refused for {reason}")


Start = Callable[..., Mailbox]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    generate(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def start(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(access, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr("control.plane._KEYS_S", 0.05)
    planes: list[ControlPlane] = []

    def make(role: Role = "gateway", keys: Keys | None = None, port: int = 0, encrypted: bool = True) -> Mailbox:
        inbox: queue.SimpleQueue[tuple[Peer, Message]] = queue.SimpleQueue()
        keys = keys or load_keys(directory, role) if encrypted else None
        plane = ControlPlane(role, "127.0.0.1", port, "127.0.0.1", lambda *item: inbox.put(item), keys)
        planes.append(plane)
        plane.start()
        return Mailbox(plane, inbox)

    yield make
    for plane in planes:
        plane.stop()


class Stranger:
    """A PUSH socket that connects to a mailbox with the keys it is given, or none."""

    def __init__(self, to: Mailbox, own: KeyPair | None = None, cluster: str | None = None) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PUSH)
        self.socket.setsockopt(zmq.LINGER, 0)
        if own is not None and cluster is not None:
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, cluster.encode())
        self.socket.connect(f"tcp://{to.me.address}")

    def send(self, data: bytes) -> None:
        self.socket.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()


def new_pair() -> KeyPair:
    return KeyPair(*(half.decode() for half in zmq.curve_keypair()))


def assert_serves(sender: Mailbox, receiver: Mailbox) -> None:
    """The next message to arrive is one of the legitimate sender's."""
    sender.plane.send(receiver.me, Cancel(request_id="legitimate"))
    assert receiver.take() == (sender.me, Cancel(request_id="legitimate"))


def test_processes_with_keys_understand_each_other(start: Start) -> None:
    gateway, decode = start("gateway"), start("decode")
    for _ in range(100):
        gateway.plane.send(decode.me, Cancel(request_id="r"))
        decode.plane.send(gateway.me, Leaving())
    for _ in range(100):
        assert decode.take() == (gateway.me, Cancel(request_id="r"))
        assert gateway.take() == (decode.me, Leaving())
    assert set(decode.plane.refused.values()) == {0}


def test_what_passes_is_encrypted(start: Start) -> None:
    gateway, decode = start("gateway"), start("decode")
    with Recorder(decode.port) as recorder:
        address = f"127.0.0.1:{recorder.port}"
        gateway.plane.send(decode.me.model_copy(update={"address": address}), Cancel(request_id="A" * 50))
        decode.take()
        assert b"CURVE" in recorder.to_server[0]
        assert b"AAAA" not in recorder.to_server[0]
        assert b"Cancel" not in recorder.to_server[0]


# --- no key, wrong keys ---


def test_without_a_key_nothing_is_delivered(start: Start) -> None:
    gateway, decode = start("gateway"), start("decode")
    stranger = Stranger(decode)
    stranger.send(encode(Cancel(request_id="plain"), gateway.me))
    decode.wait_refused("handshake")
    assert_serves(gateway, decode)
    stranger.close()


def test_a_key_that_is_not_allowed_is_refused_until_it_is(start: Start, directory: Path) -> None:
    """And works from then on: nothing is remembered against it."""
    gateway, decode = start("gateway"), start("decode")
    cluster, own = load_keys(directory, "gateway").cluster.public, new_pair()
    stranger = Stranger(decode, own, cluster)
    sender = Peer(role="gateway", address="127.0.0.1:1", boot_id="new")
    stranger.send(encode(Cancel(request_id="late"), sender))
    decode.wait_refused("key", 2)
    assert_serves(gateway, decode)
    (directory / "allowed" / "new.key").write_text(
        f'metadata\n    role = gateway\ncurve\n    public-key = "{own.public}"'
    )
    assert decode.take() == (sender, Cancel(request_id="late"))
    stranger.close()


def test_the_key_of_another_cluster_is_refused(start: Start, directory: Path, tmp_path: Path) -> None:
    gateway, decode = start("gateway"), start("decode")
    generate(tmp_path / "other")
    other = load_keys(tmp_path / "other", "gateway")
    stranger = Stranger(decode, load_keys(directory, "gateway").own, other.cluster.public)
    stranger.send(encode(Cancel(request_id="wrong"), gateway.me))
    decode.wait_refused("handshake")
    assert_serves(gateway, decode)
    stranger.close()


def test_nothing_is_said_to_a_mailbox_that_is_not_the_cluster_s(start: Start, tmp_path: Path) -> None:
    """Whoever takes a node's address without the cluster's secret is told nothing."""
    gateway = start("gateway")
    generate(tmp_path / "other")
    for impostor in (start("decode", load_keys(tmp_path / "other", "decode")), start("decode", encrypted=False)):
        gateway.plane.repeat("key", impostor.me, Cancel(request_id="secret"), every=0.05)
        impostor.wait_refused("handshake")
        assert impostor.inbox.empty()
        gateway.plane.answered("key")


def test_a_process_that_was_without_keys_is_reached_once_it_has_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ gives up a connection whose other end expects other security; we do not.

    If the other end stops at the wrong moment, ZeroMQ goes on taking frames for the connection.
    """
    monkeypatch.setattr(connections, "STUCK_S", 0.2)
    monkeypatch.setattr(connections, "DEAF_S", 1.0)
    gateway, plain = start("gateway"), start("decode", encrypted=False)
    word = Cancel(request_id="r")
    gateway.plane.periodically(0.05, lambda: gateway.plane.send(plain.me, word, any_boot=True))
    plain.wait_refused("handshake")
    plain.plane.stop()
    encrypted = start("decode", port=plain.port)
    assert encrypted.take() == (gateway.me, Cancel(request_id="r"))


# --- keys that may less ---


def test_a_revoked_key_is_not_listened_to_on_the_connection_that_it_has(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(access, "log", log)
    generate_node(directory, "gateway:second")
    (directory / "nodes" / "second" / "gateway.key_secret").rename(directory / "nodes" / "gateway.key_secret")
    for name in ("cluster.key_secret", "allowed"):
        (directory / "nodes" / name).symlink_to(f"../{name}")
    first, second = start("gateway"), start("gateway", load_keys(directory / "nodes", "gateway"))
    decode = start("decode")
    for sender in (first, second):
        assert_serves(sender, decode)
    assert not decode.plane.is_revoked(second.me)
    (directory / "allowed" / "second.key").unlink()
    second.plane.repeat("key", decode.me, Cancel(request_id="revoked"), every=0.05)
    decode.wait_refused("revoked")
    assert [call.kwargs["file"] for call in log.calls if call.kwargs["reason"] == "revoked"] == ["second.key"]
    assert decode.plane.is_revoked(second.me)
    assert not decode.plane.is_revoked(first.me)
    with suppress(queue.Empty):
        while True:
            decode.inbox.get_nowait()
    assert_serves(first, decode)


def test_a_key_speaks_for_its_role_only(start: Start, directory: Path) -> None:
    """A prefill node's key cancels no requests, nor makes other prefill nodes write."""
    gateway, decode = start("gateway"), start("decode")
    keys = load_keys(directory, "prefill")
    stranger = Stranger(decode, keys.own, keys.cluster.public)
    stranger.send(encode(Cancel(request_id="r"), gateway.me))
    decode.wait_refused("role")
    stranger.send(encode(Cancel(request_id="r"), gateway.me.model_copy(update={"role": "prefill"})))
    wait_until(lambda: decode.plane.malformed == 1)
    assert_serves(gateway, decode)
    stranger.close()


def test_a_node_does_not_speak_for_another_one_of_its_role(start: Start, directory: Path) -> None:
    generate_node(directory, "gateway:second")
    text = (directory / "nodes" / "second" / "gateway.key_secret").read_text().split('"')
    gateway, decode = start("gateway"), start("decode")
    assert_serves(gateway, decode)
    stranger = Stranger(decode, KeyPair(text[1], text[3]), load_keys(directory, "gateway").cluster.public)
    stranger.send(encode(Cancel(request_id="r"), gateway.me))
    decode.wait_refused("boot")
    assert_serves(gateway, decode)
    stranger.close()


# --- floods, garbage, replays ---


def test_garbage_frames_under_an_allowed_key_slow_nobody(start: Start, directory: Path) -> None:
    gateway, decode = start("gateway"), start("decode")
    keys = load_keys(directory, "prefill")
    stranger = Stranger(decode, keys.own, keys.cluster.public)
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
def test_a_connection_that_is_not_ours_is_closed_and_counted(start: Start, data: bytes) -> None:
    gateway, decode = start("gateway"), start("decode")
    for _ in range(5):
        with closing(socket.create_connection(("127.0.0.1", decode.port), timeout=10)) as raw, suppress(OSError):
            raw.sendall(data)
            while raw.recv(4096):
                pass
    decode.wait_refused("handshake", 5)
    assert_serves(gateway, decode)


def test_half_open_connections_are_closed_in_time(start: Start) -> None:
    """Someone who connects and says nothing, or only half a greeting, does not keep the port busy."""
    gateway, decode = start("gateway"), start("decode")
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


def test_an_oversized_frame_is_never_kept(start: Start, directory: Path) -> None:
    gateway, decode = start("gateway"), start("decode")
    keys = load_keys(directory, "prefill")
    stranger = Stranger(decode, keys.own, keys.cluster.public)
    stranger.send(bytes(MAX_FRAME_BYTES + 1))
    stranger.send(b"garbage")
    wait_until(lambda: decode.plane.malformed == 1, what="its connection to be closed, and made again")
    assert_serves(gateway, decode)
    stranger.close()


def test_an_oversized_message_is_not_even_sent(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver would close the connection, with all else that is under way on it."""
    gateway, decode = start("gateway"), start("decode")
    monkeypatch.setattr("control.plane.MAX_FRAME_BYTES", 1000)
    gateway.plane.send(decode.me, Cancel(request_id="r"))
    gateway.plane.send(decode.me, Cancel(request_id="next"))
    gateway.plane.send(decode.me.model_copy(update={"boot_id": "b" * 1000}), Cancel(request_id="r"))
    gateway.plane.send(decode.me, Cancel(request_id="last"))
    assert decode.take()[1] == Cancel(request_id="r")
    assert decode.take()[1] == Cancel(request_id="next")
    assert decode.take()[1] == Cancel(request_id="last")
    assert gateway.plane.undeliverable == 1


class Recorder:
    """Passes connections on to a port and keeps what clients sent."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.to_server: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [client, server]
                self.to_server.append(bytearray())
                threading.Thread(target=self._pump, args=(client, server, self.to_server[-1]), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, bytearray()), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, to: socket.socket, record: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                to.sendall(data)


def test_recorded_traffic_is_worthless_when_it_is_replayed(start: Start) -> None:
    """A handshake's keys are of one connection: neither all of a recording nor a part of it is taken again."""
    gateway, decode = start("gateway"), start("decode")
    with Recorder(decode.port) as recorder:
        through = decode.me.model_copy(update={"address": f"127.0.0.1:{recorder.port}"})
        for number in range(20):
            gateway.plane.send(through, Cancel(request_id=str(number)))
            assert decode.take() == (gateway.me, Cancel(request_id=str(number)))
        recording = bytes(recorder.to_server[0])
    for part in (recording, recording[: len(recording) // 2], recording[:-1], GREETING + recording[-200:]):
        for _ in range(5):
            with closing(socket.create_connection(("127.0.0.1", decode.port), timeout=10)) as raw, suppress(OSError):
                raw.sendall(part)
                while raw.recv(4096):
                    pass
            assert_serves(gateway, decode)
    decode.wait_refused("handshake", 20)
    assert decode.inbox.empty()


def test_a_refusal_is_logged_once_and_without_a_secret(
    start: Start, directory: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    decode = start("decode")
    keys = load_keys(directory, "gateway")
    unknown = new_pair()
    strangers = [Stranger(decode, unknown, keys.cluster.public) for _ in range(5)]
    decode.wait_refused("key", 20)
    for stranger in strangers:
        stranger.close()
    decode.plane.stop()
    # Where logs go depends on whether an earlier test of this process has configured them.
    output = capsys.readouterr().out + caplog.text
    assert output.count("refused on the control port") == 1
    assert unknown.public in output
    for secret in (unknown.secret, keys.cluster.secret, keys.own.secret):
        assert secret not in output
