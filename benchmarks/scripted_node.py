"""A node that computes nothing, for measurements and tests of gateways. It registers by the real membership code."""

from typing import Literal

from control.discovery import GatewayAddresses
from control.membership import Membership
from control.messages import Heartbeat, HeartbeatAck, Message, ModelIdentity, Peer, Refused, Register, Registered
from control.plane import ControlPlane

SCRIPTED_IDENTITY = ModelIdentity(
    fingerprint="scripted",
    dtype="torch.float32",
    kv_format="float32",
    draft_layer=False,
    num_layers=1,
    num_index_layers=1,
    item_bytes=4,
    index_key_bytes=4,
)


class ScriptedNode:
    """Registers at a gateway and sends it heartbeats. Derived classes handle other messages in `deliver`."""

    def __init__(
        self,
        gateway_address: str,
        role: Literal["prefill", "decode"],
        *,
        port: int = 0,
        identity: ModelIdentity = SCRIPTED_IDENTITY,
        max_request_tokens: int = 4096,
        queued_tokens: int = 0,
        rank_group: str = "",
    ) -> None:
        """gateway_address: HOST:PORT of its control port."""
        self.gateway_address = gateway_address
        self.role = role
        self.identity = identity
        self.max_request_tokens = max_request_tokens
        self.queued_tokens = queued_tokens
        self.rank_group = rank_group
        self.control = ControlPlane(role, "127.0.0.1", port, "127.0.0.1", self.deliver)
        self.membership = Membership(self.control, GatewayAddresses([gateway_address]), self._offer, self._beat)

    def run(self, tick_s: float) -> None:
        """Register, and send heartbeats from now on. tick_s: how often to look whether one is due."""
        self.control.start()
        self.control.periodically(tick_s, self.membership.tick)

    def die(self) -> None:
        """Go without a word."""
        self.control.stop()

    def deliver(self, sender: Peer, message: Message) -> None:
        """Handle a message, on the control thread."""
        if isinstance(message, Registered | Refused | HeartbeatAck):
            self.membership.receive(sender, message)

    def _offer(self, via: str) -> Register:
        return Register(
            via=via,
            role=self.role,
            identity=self.identity,
            transports=("tcp",),
            page_size=64,
            max_request_tokens=self.max_request_tokens,
            rank_group=self.rank_group,
        )

    def _beat(self, via: str) -> Heartbeat:
        return Heartbeat(via=via, ready=True, queued_tokens=self.queued_tokens)
