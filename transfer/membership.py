"""A node's standing with its gateways: it registers, heartbeats, and registers again where it is not known."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from transfer.control import ControlPlane
from transfer.messages import Heartbeat, HeartbeatAck, Leaving, Peer, Refused, Register, Registered

log = structlog.get_logger(__name__)

HEARTBEAT_S = 1.0


@dataclass
class _Gateway:
    peer: Peer
    registered: bool = False
    ever_registered: bool = False
    last_heard: float = field(default_factory=time.monotonic)

    def reached_at(self, address: str) -> Peer:
        return self.peer.model_copy(update={"address": address})


class Membership:
    """Keeps one node registered with every gateway that it was told of.

    Runs on the control thread, so that a busy node is not taken for a dead one; `register` and `heartbeat` are called
    there. Other threads only ask (`registered`, `refusal`, `gateway_lost`).
    """

    def __init__(
        self,
        control: ControlPlane,
        gateways: Sequence[str],
        register: Callable[[str], Register],
        heartbeat: Callable[[str], Heartbeat],
    ) -> None:
        """`register` and `heartbeat` make the message for a gateway's address."""
        self._control = control
        self._register = register
        self._heartbeat = heartbeat
        self.refusal: str | None = None
        """Why a gateway that never took this node refuses it: it should not have been started like this."""
        self._leaving = False
        self._gateways = {
            address: _Gateway(Peer(role="gateway", address=address, boot_id="unknown")) for address in gateways
        }

    @property
    def is_member(self) -> bool:
        """Whether a gateway has it registered; a node that was told of none needs none."""
        return not self._gateways or any(gateway.registered for gateway in self._gateways.values())

    def tick(self) -> None:
        """Register or heartbeat, whichever each gateway needs. A node that leaves joins no gateway any more."""
        for address, gateway in self._gateways.items():
            to = gateway.reached_at(address)
            if gateway.registered:
                self._control.send(to, self._heartbeat(address), any_boot=True)
            if self._leaving:
                self._control.send(to, Leaving(), any_boot=True)
            elif not gateway.registered:
                self._control.send(to, self._register(address), any_boot=True)

    def receive(self, sender: Peer, message: Registered | Refused | HeartbeatAck) -> None:
        """Take a gateway's answer."""
        gateway = self._gateways.get(message.via)
        if gateway is None:
            log.warning("answer from a gateway that this node was not told of", gateway=sender.address)
            return
        gateway.peer = sender
        gateway.last_heard = time.monotonic()
        if isinstance(message, Registered):
            if not gateway.registered:
                log.info("registered", gateway=sender.address)
            gateway.registered = gateway.ever_registered = True
        elif isinstance(message, Refused):
            gateway.registered = False
            if not gateway.ever_registered:
                self.refusal = f"gateway {sender.address}: {message.reason}"
            log.error("refused by the gateway", gateway=sender.address, reason=message.reason)
        elif not message.known:
            gateway.registered = False
            if not self._leaving:
                self._control.send(gateway.reached_at(message.via), self._register(message.via), any_boot=True)

    def gateway_lost(self, peer: Peer, now: float, silence_s: float) -> bool:
        """Whether that gateway process is gone: another boot has answered in its place, or none has for so long."""
        for gateway in self._gateways.values():
            if gateway.peer.boot_id == peer.boot_id:
                return now - gateway.last_heard > silence_s
        return True

    def leave(self) -> None:
        """Tell every gateway that this node takes no more, again with every heartbeat."""
        self._leaving = True
        for address, gateway in self._gateways.items():
            self._control.send(gateway.reached_at(address), Leaving(), any_boot=True)
