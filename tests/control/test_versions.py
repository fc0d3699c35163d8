"""Processes of two wire versions: what is stable is understood, frames made by hand, and the rest is dropped."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
import pytest
import structlog
import zmq

from control.codec import PROTOCOL_VERSION, MalformedMessage, decode, encode
from control.discovery import GatewayAddresses
from control.membership import Membership
from control.messages import Cancel, HeartbeatAck, Peer, Ping, Refused, Registered, Role
from tests.control.harness import Start
from tests.control.test_membership import Node
from tests.e2e.cluster import wait_until
from tests.starting import starting

OTHERS = pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
Body = Mapping[str, object]


class Foreign:
    """A process of another wire version: a mailbox that knows the stable part of the protocol, and nothing else."""

    def __init__(self, version: int, role: Role) -> None:
        self.version = version
        self.context = zmq.Context()
        self.mailbox = self.context.socket(zmq.PULL)
        port = self.mailbox.bind_to_random_port("tcp://127.0.0.1")
        self.me = {"role": role, "address": f"127.0.0.1:{port}", "boot_id": f"boot of {role}"}
        self._out: dict[str, zmq.Socket[bytes]] = {}

    @property
    def address(self) -> str:
        return str(self.me["address"])

    @property
    def peer(self) -> Peer:
        return Peer.model_validate(self.me)

    def send(self, to: str, kind: str, body: Body) -> None:
        if to not in self._out:
            self._out[to] = self.context.socket(zmq.PUSH)
            self._out[to].connect(f"tcp://{to}")
        # With a key that no version has known so far, in the envelope and in the body.
        frame = {"v": self.version, "kind": kind, "sender": self.me, "later": 1, "body": {**body, "later": [2]}}
        self._out[to].send(msgpack.packb(frame))

    def receive(self, *kinds: str) -> tuple[Mapping[str, Any], Body]:
        """The next frame of one of these kinds, and its body."""
        while True:
            assert self.mailbox.poll(10_000), f"no {kinds} arrived"
            frame = msgpack.unpackb(self.mailbox.recv())
            if frame["kind"] in kinds:
                return frame, frame["body"]

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def foreign() -> Iterator[Callable[[int, Role], Foreign]]:
    with starting(Foreign, Foreign.close) as make:
        yield make


Make = Callable[[int, Role], Foreign]


@OTHERS
@pytest.mark.parametrize("kind", ["Register", "Heartbeat"])
def test_a_node_of_another_version_is_refused_in_its_words(
    start: Start, foreign: Make, version: int, kind: str
) -> None:
    """It was dropped as malformed, and a rollout of a new version showed nothing."""
    gateway, inbox = start("gateway")
    node = foreign(version, "prefill")
    node.send(gateway.me.address, kind, {"via": "gateways:8001"})
    frame, body = node.receive("Refused")
    assert (frame["v"], frame["to"]) == (version, node.me["boot_id"])
    assert frame["sender"] == gateway.me.model_dump()
    assert body["via"] == "gateways:8001"
    assert f"wire version {version} != {PROTOCOL_VERSION}" in str(body["reason"])
    assert node.address in str(body["reason"])
    assert inbox.empty(), "nothing else can be read of it"
    wait_until(lambda: gateway.refused["version"] == 1)
    assert gateway.malformed == 0


@OTHERS
@pytest.mark.parametrize("answer", ["Refused", "Registered"])
def test_a_node_is_refused_by_a_gateway_of_another_version(foreign: Make, version: int, answer: str) -> None:
    gateway = foreign(version, "gateway")
    node = Node(GatewayAddresses([gateway.address]))
    frame, body = gateway.receive("Register")
    assert set(frame) >= {"v", "kind", "sender", "to", "body"}
    assert frame["v"] == PROTOCOL_VERSION
    assert frame["sender"] == node.control.me.model_dump()
    assert body["via"] == gateway.address
    reason = f"wire version {PROTOCOL_VERSION} != {version}"
    gateway.send(node.control.me.address, answer, {"via": body["via"], "reason": reason})
    refusal = wait_until(lambda: node.membership.rejection_reason)
    expected = reason if answer == "Refused" else f"wire version {version} != {PROTOCOL_VERSION}"
    assert refusal == f"gateway {gateway.address}: {expected}"
    assert not node.membership.is_member
    node.control.stop()


@OTHERS
def test_a_node_whose_gateway_changes_its_version_is_no_member(start: Start, foreign: Make, version: int) -> None:
    """Its heartbeats were dropped, and it went on as if it were registered."""
    control, _ = start("decode")
    gateway = foreign(version, "gateway")
    membership = Membership(control, GatewayAddresses([gateway.address]), Node.offer, Node.beat)
    membership.tick()
    membership.receive(gateway.peer, Registered(via=gateway.address))
    assert membership.is_member
    membership.tick()
    _, body = gateway.receive("Heartbeat")
    assert body["via"] == gateway.address
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            membership.receive(gateway.peer, Refused(via=gateway.address, reason="wire version 5 != 6"))
            membership.tick()
    assert not membership.is_member
    assert membership.rejection_reason is None, "what it has begun may be finished, and another gateway may know it"
    assert [line["event"] for line in logs] == ["refused by the gateway"]
    gateway.receive("Register")


@OTHERS
def test_who_lives_is_told_across_versions(start: Start, foreign: Make, version: int) -> None:
    """A process that has taken the address of another proves that one dead: its slots would stay in quarantine."""
    decode, inbox = start("decode")
    other = foreign(version, "prefill")
    other.send(decode.me.address, "Ping", {"nonce": 7})
    frame, body = other.receive("Pong")
    assert (frame["v"], body["nonce"]) == (version, 7)
    decode.watch([other.peer.model_copy(update={"boot_id": "the one before"})])
    frame, body = other.receive("Ping")
    assert frame["to"] == "", "for whoever has the address"
    other.send(decode.me.address, "Pong", {"nonce": body["nonce"]})
    answer = wait_until(lambda: decode.answer_at(other.address))
    assert answer.boot_id == other.me["boot_id"]
    assert decode.refused["version"] == 0
    assert inbox.empty()


@OTHERS
def test_other_messages_of_another_version_are_dropped_and_counted(start: Start, foreign: Make, version: int) -> None:
    decode, inbox = start("decode")
    senders = [foreign(version, "gateway"), foreign(version, "prefill")]
    with structlog.testing.capture_logs() as logs:
        for sender in senders:
            for _ in range(3):
                sender.send(decode.me.address, "Cancel", {"request_id": "r"})
        wait_until(lambda: decode.refused["version"] == 6)
    assert inbox.empty()
    assert decode.malformed == 0
    assert sorted((line["event"], line["peer"], line["role"], line["reason"]) for line in logs) == sorted(
        ("a process of another wire version", sender.address, str(sender.me["role"]), reason)
        for sender in senders
        for reason in [f"wire version {version} != {PROTOCOL_VERSION}"]
    )


@OTHERS
def test_another_version_is_not_heard_for_an_earlier_boot(start: Start, foreign: Make, version: int) -> None:
    gateway, _ = start("gateway")
    node = foreign(version, "decode")
    frame = {"v": version, "kind": "Ping", "sender": node.me, "to": "another boot", "body": {"nonce": 1}}
    node.send(gateway.me.address, "Ping", {"nonce": 0})
    node._out[gateway.me.address].send(msgpack.packb(frame))
    node.send(gateway.me.address, "Ping", {"nonce": 2})
    assert [node.receive("Pong")[1]["nonce"] for _ in range(2)] == [0, 2]


@OTHERS
@pytest.mark.parametrize(
    ("role", "kind", "body"),
    [
        ("gateway", "Register", {"via": "a:1"}),
        ("prefill", "Refused", {"via": "a:1", "reason": "?"}),
        ("prefill", "Register", {"via": "no address"}),
        ("gateway", "Refused", {"via": "a:1"}),
        ("prefill", "Ping", {}),
    ],
)
def test_what_breaks_the_stable_part_is_malformed(version: int, role: str, kind: str, body: Body) -> None:
    sender = {"role": role, "address": "127.0.0.1:1", "boot_id": "b"}
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb({"v": version, "kind": kind, "sender": sender, "to": "", "body": body}))


def test_only_what_is_stable_is_said_in_another_version() -> None:
    me = Peer(role="gateway", address="127.0.0.1:1", boot_id="b")
    version = PROTOCOL_VERSION + 1
    for message in (Refused(via="a:1", reason="?"), Registered(via="a:1"), Ping(nonce=1)):
        frame, stable = decode(encode(message, me, version=version))
        assert (frame.v, stable) == (version, message)
    for message in (Cancel(request_id="r"), HeartbeatAck(via="a:1", known=True)):
        with pytest.raises(ValueError, match="is not the same in wire version"):
            encode(message, me, version=version)
