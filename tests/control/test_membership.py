"""A node's standing with gateways that come and go, over real mailboxes."""

import time
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import CapturingLogger

from control import membership
from control.discovery import GatewayAddresses
from control.membership import Membership
from control.messages import (
    Heartbeat,
    HeartbeatAck,
    Leaving,
    Message,
    Peer,
    Refused,
    Register,
    Registered,
)
from control.plane import ControlPlane
from tests.e2e.cluster import wait_until
from tests.identity import IDENTITY
from tests.prefill_node.fakes import FakeControl
from tests.starting import starting


class Gateway:
    """A mailbox that takes nodes in, or refuses them."""

    def __init__(self, port: int = 0, refuses: str = "") -> None:
        self.refuses = refuses
        self.known: set[str] = set()
        self.seen: list[Message] = []
        self.control = ControlPlane("gateway", "127.0.0.1", port, "127.0.0.1", self._deliver)
        self.control.start()

    @property
    def address(self) -> str:
        return self.control.me.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def _deliver(self, sender: Peer, message: Message) -> None:
        self.seen.append(message)
        if isinstance(message, Register) and self.refuses:
            self.control.send(sender, Refused(via=message.via, reason=self.refuses))
        elif isinstance(message, Register):
            self.known.add(sender.boot_id)
            self.control.send(sender, Registered(via=message.via))
        elif isinstance(message, Heartbeat):
            self.control.send(sender, HeartbeatAck(via=message.via, known=sender.boot_id in self.known))


class Listed(GatewayAddresses):
    """Addresses that a test sets."""

    def __init__(self, *gateways: Gateway) -> None:
        super().__init__(["gateways:8001"])
        self.list(*gateways)

    def list(self, *gateways: Gateway) -> None:
        self.current = frozenset(gateway.address for gateway in gateways)


class Node:
    """A node's mailbox and membership, which heartbeats fast."""

    def __init__(self, addresses: GatewayAddresses) -> None:
        self.control = ControlPlane("decode", "127.0.0.1", 0, "127.0.0.1", self._deliver)
        self.membership = Membership(self.control, addresses, self.offer, self.beat)
        self.control.start()
        self.control.periodically(0.02, self.membership.tick)

    def _deliver(self, sender: Peer, message: Message) -> None:
        if isinstance(message, Registered | Refused | HeartbeatAck):
            self.membership.receive(sender, message)

    @staticmethod
    def offer(via: str) -> Register:
        return Register(
            via=via, role="decode", identity=IDENTITY, transports=("tcp",), page_size=1, max_request_tokens=1
        )

    @staticmethod
    def beat(via: str) -> Heartbeat:
        return Heartbeat(via=via, ready=True, queued_tokens=0)


StartGateway = Callable[..., Gateway]
StartNode = Callable[[GatewayAddresses], Node]


@pytest.fixture
def gateway() -> Iterator[StartGateway]:
    with starting(Gateway, lambda one: one.control.stop()) as start:
        yield start


@pytest.fixture
def node() -> Iterator[StartNode]:
    with starting(Node, lambda one: one.control.stop()) as start:
        yield start


def test_a_gateway_is_kept_while_it_answers(
    gateway: StartGateway, node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drains; to forget it would be to end its requests."""
    monkeypatch.setattr(membership, "FORGOTTEN_AFTER_S", 0.6)
    leaving, staying = gateway(), gateway()
    addresses = Listed(leaving, staying)
    me = node(addresses)
    wait_until(lambda: leaving.known and staying.known)
    addresses.list(staying)
    seen = len(leaving.seen)
    wait_until(lambda: len(leaving.seen) > seen + 60, what="heartbeats for twice the time after which it is forgotten")
    assert not me.membership.gateway_lost(leaving.control.me, 0.0, 0.0)

    leaving.control.stop()
    wait_until(lambda: me.membership.gateway_lost(leaving.control.me, 0.0, 0.0), what="the silent one to be forgotten")
    assert me.membership.is_member
    assert not me.membership.gateway_lost(staying.control.me, 0.0, 0.0)


def test_a_request_may_come_before_the_first_answer_of_its_gateway(gateway: StartGateway, node: StartNode) -> None:
    """A node that took it for the request of a lost gateway would abort it."""
    stopped = gateway()
    stopped.control.stop()
    me = node(Listed(stopped))
    asks, now = Peer(role="gateway", address=stopped.address, boot_id="not heard"), time.monotonic()
    wait_until(lambda: not me.membership.gateway_lost(asks, now, 30.0))
    assert me.membership.gateway_lost(asks, now + 60.0, 30.0)


def test_a_forgotten_address_gets_no_node(
    gateway: StartGateway, node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses of pods are used again, also by others."""
    monkeypatch.setattr(membership, "FORGOTTEN_AFTER_S", 0.5)
    gone, staying = gateway(), gateway()
    addresses = Listed(gone, staying)
    me = node(addresses)
    wait_until(lambda: gone.known and staying.known)
    addresses.list(staying)
    gone.control.stop()
    stranger = gateway(port=gone.port)
    wait_until(lambda: me.membership.gateway_lost(gone.control.me, 0.0, 0.0), what="the gateway to be forgotten")
    assert stranger.seen == []


def test_a_later_gateway_that_refuses_the_node_does_not_stop_it(gateway: StartGateway, node: StartNode) -> None:
    """Or the first gateway of a new release would stop every node of the old one."""
    first, other = gateway(), gateway(refuses="another model")
    addresses = Listed(first)
    me = node(addresses)
    wait_until(lambda: me.membership.is_member)
    addresses.list(first, other)
    wait_until(lambda: other.seen)
    seen = len(first.seen)
    wait_until(lambda: len(first.seen) > seen + 5)
    assert me.membership.rejection_reason is None


def test_a_node_joins_the_one_gateway_of_its_version(gateway: StartGateway, node: StartNode) -> None:
    refuses, silent = gateway(refuses="another version"), gateway()
    silent.control.stop()
    me = node(Listed(refuses, silent))
    wait_until(lambda: len(refuses.seen) > 3)
    assert (me.membership.is_member, me.membership.rejection_reason) == (False, None)
    gateway(port=silent.port)
    wait_until(lambda: me.membership.is_member)


def test_a_node_that_no_gateway_takes_should_not_have_been_started(gateway: StartGateway, node: StartNode) -> None:
    me = node(Listed(*(gateway(refuses="another model") for _ in range(2))))
    assert "another model" in wait_until(lambda: me.membership.rejection_reason)


def test_a_node_that_nobody_answers_says_so(node: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong address, or a key that the gateway does not know: the node itself sees nothing but silence."""
    monkeypatch.setattr(membership, "MISSED_AFTER_S", 0.2)
    log = CapturingLogger()
    monkeypatch.setattr(membership, "log", log)
    node(GatewayAddresses(["127.0.0.1:9"]))
    wait_until(lambda: log.calls)
    assert [(call.method_name, call.kwargs["gateway"]) for call in log.calls] == [("warning", "127.0.0.1:9")]


# --- how a node takes its leave ---

VIA = "127.0.0.1:1"
GATEWAY = Peer(role="gateway", address=VIA, boot_id="g")


class Member:
    """The membership of a node that has said that it is there."""

    def __init__(self) -> None:
        self.control = FakeControl()
        self.membership = Membership(self.control, GatewayAddresses([VIA]), Node.offer, Node.beat)  # type: ignore[arg-type]
        self.membership.tick()

    def tick(self) -> list[type[object]]:
        """The kinds of messages that a tick sends."""
        self.control.sent.clear()
        self.membership.tick()
        return [type(message) for _, message in self.control.sent]


@pytest.fixture
def member() -> Member:
    return Member()


def test_a_node_registers_until_it_is_registered_and_heartbeats_then(member: Member) -> None:
    assert member.tick() == [Register]
    member.membership.receive(GATEWAY, Registered(via=VIA))
    assert member.tick() == [Heartbeat]
    member.membership.receive(GATEWAY, HeartbeatAck(via=VIA, known=False))
    assert member.tick() == [Register]


def test_a_node_that_leaves_says_so_with_every_heartbeat_and_joins_no_more(member: Member) -> None:
    """The message may be lost; a gateway that did not hear it would go on sending requests."""
    member.membership.receive(GATEWAY, Registered(via=VIA))
    member.membership.leave()
    assert member.tick() == [Heartbeat, Leaving]
    member.control.sent.clear()
    member.membership.receive(GATEWAY, HeartbeatAck(via=VIA, known=False))
    assert member.control.sent == []
    assert member.tick() == [Leaving]
