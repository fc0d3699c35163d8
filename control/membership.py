"""A node's standing with its gateways: it registers, heartbeats, and registers again where it is not known.

Gateways come and go (`control.discovery`). One whose address is listed no more is kept while that process answers: it
may be finishing what it has, and a node that forgot it would end its requests.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from control.discovery import GatewayAddresses
from control.messages import Heartbeat, HeartbeatAck, Leaving, Message, Peer, Refused, Register, Registered
from control.plane import ControlPlane

log = structlog.get_logger(__name__)

HEARTBEAT_S = 1.0
MISSED_AFTER_S = 5.0
_MISSED_AGAIN_S = 60.0
FORGOTTEN_AFTER_S = 30.0
"""A gateway that is listed no more is forgotten after so long a silence."""


@dataclass
class _Gateway:
    peer: Peer
    listed: bool = True
    registered: bool = False
    last_heard: float = field(default_factory=time.monotonic)
    missed_at: float = -math.inf
    """When it was last complained that it does not answer."""
    refusal: str | None = None
    """Why it refused this node the last time; None if it has taken it since."""

    def reached_at(self, address: str) -> Peer:
        return self.peer.model_copy(update={"address": address})


class Membership:
    """Keeps one node registered with every gateway that there is.

    Runs on the control thread, so that a busy node is not taken for a dead one; `register` and `heartbeat` are called
    there. Other threads only ask (`is_member`, `refusal`, `gateway_lost`) or say `leave`, so the table of gateways is
    replaced, never changed.
    """

    def __init__(
        self,
        control: ControlPlane,
        addresses: GatewayAddresses,
        register: Callable[[str], Register],
        heartbeat: Callable[[str], Heartbeat],
    ) -> None:
        """`register` and `heartbeat` make the message for a gateway's address."""
        self._control = control
        self._register = register
        self._heartbeat = heartbeat
        self.refusal: str | None = None
        """Why a gateway refuses this node, which none has taken yet: it should not have been started like this."""
        self._ever_registered = False
        self._leaving = False
        self._addresses = addresses
        self._gateways: dict[str, _Gateway] = {}

    @property
    def is_member(self) -> bool:
        """Whether a gateway has it registered; a node that was told of none needs none."""
        return not self._addresses.expected or any(gateway.registered for gateway in self._gateways.values())

    def tick(self) -> None:
        """Register or heartbeat, whichever each gateway needs. A node that leaves joins no gateway any more."""
        self._take_in(self._addresses.current)
        for address, gateway in self._gateways.items():
            if gateway.registered:
                self._tell(address, gateway, self._heartbeat(address))
            if self._leaving:
                self._tell(address, gateway, Leaving())
            elif not gateway.registered:
                self._tell(address, gateway, self._register(address))
                self._miss(address, gateway)

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
            gateway.registered = self._ever_registered = True
            gateway.refusal = None
        elif isinstance(message, Refused):
            gateway.registered = False
            if not self._ever_registered:
                self.refusal = f"gateway {sender.address}: {message.reason}"
            if gateway.refusal != message.reason:
                # The node asks every second; it is said once.
                log.error("refused by the gateway", gateway=sender.address, reason=message.reason)
            gateway.refusal = message.reason
        elif not message.known:
            gateway.registered = False
            if not self._leaving:
                self._tell(message.via, gateway, self._register(message.via))

    def gateway_lost(self, peer: Peer, now: float, silence_s: float) -> bool:
        """Whether that gateway process is gone: another boot has answered in its place, or none has for so long."""
        for gateway in self._gateways.values():
            if gateway.peer.boot_id == peer.boot_id:
                return now - gateway.last_heard > silence_s
        return True

    def _miss(self, address: str, gateway: _Gateway) -> None:
        """Say now and then that it does not answer: a node that nobody knows has no other sign of it."""
        now = time.monotonic()
        if now - gateway.last_heard > MISSED_AFTER_S and now - gateway.missed_at > _MISSED_AGAIN_S:
            gateway.missed_at = now
            log.warning(
                "no answer from a gateway: it is not there, or it refuses this node's key, which its log says",
                gateway=address,
                seconds=round(now - gateway.last_heard),
            )

    def _tell(self, address: str, gateway: _Gateway, message: Message) -> None:
        # Who takes an address that is listed no more need not be a gateway of ours.
        self._control.send(gateway.reached_at(address), message, any_boot=gateway.listed)

    def _take_in(self, listed: frozenset[str]) -> None:
        """Add the gateways that are new, and forget those that are neither listed nor heard."""
        now = time.monotonic()
        gateways = {address: self._gateways.get(address) or _new(address) for address in sorted(listed)}
        for address, gateway in self._gateways.items():
            if address in listed or now - gateway.last_heard <= FORGOTTEN_AFTER_S:
                gateways[address] = gateway
            else:
                log.info("gateway forgotten", gateway=address)
        for address, gateway in gateways.items():
            gateway.listed = address in listed
        self._gateways = gateways

    def leave(self) -> None:
        """Tell every gateway that this node takes no more, again with every heartbeat."""
        self._leaving = True
        for address, gateway in self._gateways.items():
            self._tell(address, gateway, Leaving())


def _new(address: str) -> _Gateway:
    return _Gateway(Peer(role="gateway", address=address, boot_id="unknown"))
