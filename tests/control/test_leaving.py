"""How a node takes its leave of its gateway."""

import pytest

from control.discovery import GatewayAddresses
from control.membership import Membership
from control.messages import Heartbeat, HeartbeatAck, Leaving, Peer, Register, Registered
from tests.control.test_membership import Node
from tests.prefill_node.fakes import FakeControl

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
