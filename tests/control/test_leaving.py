"""How a node takes its leave of its gateway."""

import pytest

from control.discovery import GatewayAddresses
from control.membership import Membership
from control.messages import Heartbeat, HeartbeatAck, Leaving, Peer, Register, Registered
from tests.identity import IDENTITY
from tests.prefill_node.fakes import FakeControl

VIA = "127.0.0.1:1"
GATEWAY = Peer(role="gateway", address=VIA, boot_id="g")


class Harness:
    def __init__(self) -> None:
        self.control = FakeControl()
        self.membership = Membership(
            self.control,  # type: ignore[arg-type]
            GatewayAddresses([VIA]),
            register=lambda via: Register(
                via=via, role="decode", identity=IDENTITY, transports=("tcp",), page_size=1, max_request_tokens=1
            ),
            heartbeat=lambda via: Heartbeat(via=via, ready=True, queued_tokens=0),
        )
        self.membership.tick()

    def tick(self) -> list[type[object]]:
        """The kinds of messages that a tick sends."""
        self.control.sent.clear()
        self.membership.tick()
        return [type(message) for _, message in self.control.sent]


@pytest.fixture
def h() -> Harness:
    return Harness()


def test_a_node_registers_until_it_is_registered_and_heartbeats_then(h: Harness) -> None:
    assert h.tick() == [Register]
    h.membership.receive(GATEWAY, Registered(via=VIA))
    assert h.tick() == [Heartbeat]
    h.membership.receive(GATEWAY, HeartbeatAck(via=VIA, known=False))
    assert h.tick() == [Register]


def test_a_node_that_leaves_says_so_with_every_heartbeat(h: Harness) -> None:
    """The message may be lost; a gateway that did not hear it would go on sending requests."""
    h.membership.receive(GATEWAY, Registered(via=VIA))
    h.membership.leave()
    assert h.tick() == [Heartbeat, Leaving]


def test_a_node_that_leaves_joins_no_gateway_any_more(h: Harness) -> None:
    h.membership.receive(GATEWAY, Registered(via=VIA))
    h.membership.leave()
    h.control.sent.clear()
    h.membership.receive(GATEWAY, HeartbeatAck(via=VIA, known=False))
    assert h.control.sent == []
    assert h.tick() == [Leaving]
