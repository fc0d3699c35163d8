"""Keeps a node registered with its gateways: registration, heartbeats, and registration again where it is unknown.

Gateways come and go (`control.discovery`). A gateway that is not listed any more is kept while it answers: a node that
forgot it would end its requests. `CacheReports` tells them what the node's prefix cache has.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import structlog

from base.block_hashes import BlockHashes, StoredBlocks
from control.discovery import GatewayAddresses
from control.messages import (
    MAX_CACHE_BLOCKS,
    CacheUpdate,
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

log = structlog.get_logger(__name__)

HEARTBEAT_S = 1.0
MISSED_AFTER_S = 5.0
_MISSED_AGAIN_S = 60.0
FORGOTTEN_AFTER_S = 30.0
"""Silence after which a gateway that is not listed any more is forgotten."""
_UNKNOWN_BOOT = "unknown"
"""Of a gateway that has not answered yet."""
_REPORT_EVERY_S = 0.1
"""Changes are collected for this long: less than until the next turn of a conversation."""
_ACKNOWLEDGED_WITHIN_S = 2.5
"""A gateway that has not acknowledged an update by then, two heartbeats, has missed one."""


@dataclass
class _Gateway:
    peer: Peer
    """The process that answered last."""
    listed: bool = True
    registered: bool = False
    last_heard: float = field(default_factory=time.monotonic)
    missed_at: float = -math.inf
    """When it was last logged that it does not answer."""
    cache_serial: int | None = None
    """Of the last CacheUpdate before which it misses none; None if it wants none."""
    rejection_reason: str | None = None
    """Why it refused this node the last time; None if it has registered it since."""


@dataclass(eq=False)
class Membership:
    """Keeps one node registered with every gateway, on the control thread, so a busy node is not taken for a dead one.

    Other threads only call `is_member`, `rejection_reason`, `gateway_lost`, `leave`, `cache_serials` and `tell`, so the
    table of gateways is replaced and never changed.
    """

    control: ControlPlane
    addresses: GatewayAddresses
    register: Callable[[str], Register]
    """Makes the message for a gateway's address, on the control thread; so does `heartbeat`."""
    heartbeat: Callable[[str], Heartbeat]

    def __post_init__(self) -> None:
        self.rejection_reason: str | None = None
        """Why this node is refused, if every gateway refuses it and none has ever registered it.

        Gateways of two versions serve while a fleet is upgraded."""
        self._ever_registered = False
        self._leaving = False
        self._gateways: dict[str, _Gateway] = {}

    @property
    def is_member(self) -> bool:
        """Whether a gateway has registered this node, or it was told of none."""
        return not self.addresses.expected or any(gateway.registered for gateway in self._gateways.values())

    def tick(self) -> None:
        """Register or heartbeat, as each gateway needs. A node that leaves does not register any more."""
        self._take_in(self.addresses.current)
        for address, gateway in self._gateways.items():
            if gateway.registered:
                self._tell(address, gateway, self.heartbeat(address))
            if self._leaving:
                self._tell(address, gateway, Leaving())
            elif not gateway.registered:
                self._tell(address, gateway, self.register(address))
                self._log_if_missed(address, gateway)

    def receive(self, sender: Peer, message: Registered | Refused | HeartbeatAck) -> None:
        """Take a gateway's answer."""
        gateway = self._gateways.get(message.via)
        if gateway is None:
            log.warning("answer from a gateway that this node was not told of", gateway=sender.address)
            return
        gateway.peer = sender
        gateway.last_heard = time.monotonic()
        match message:
            case Registered():
                if not gateway.registered:
                    log.info("registered", gateway=sender.address)
                gateway.registered = self._ever_registered = True
                gateway.rejection_reason = None
            case Refused(reason=reason):
                gateway.registered = False
                if gateway.rejection_reason != reason:  # the node asks every second
                    log.error("refused by the gateway", gateway=sender.address, reason=reason)
                gateway.rejection_reason = reason
                all_refuse = all(each.rejection_reason is not None for each in self._gateways.values())
                if all_refuse and not self._ever_registered:
                    self.rejection_reason = f"gateway {sender.address}: {reason}"
            case HeartbeatAck():
                gateway.cache_serial = message.cache_serial
                gateway.registered &= message.known
                if not message.known and not self._leaving:
                    self._tell(message.via, gateway, self.register(message.via))

    def gateway_lost(self, peer: Peer, now: float, silence_s: float) -> bool:
        """Whether that gateway process is gone: another boot answers in its place, or it was silent for `silence_s`."""
        # One that has not answered yet may be that process: its requests may overtake its first answer.
        candidates = [one for one in self._gateways.values() if one.peer.boot_id in (peer.boot_id, _UNKNOWN_BOOT)]
        return all(now - gateway.last_heard > silence_s for gateway in candidates)

    def cache_serials(self) -> dict[str, int]:
        """For each gateway that wants CacheUpdates, by address: the last serial up to which it misses none."""
        return {
            address: serial
            for address, gateway in self._gateways.items()
            if gateway.registered and (serial := gateway.cache_serial) is not None
        }

    def tell(self, addresses: Iterable[str], message: Message) -> None:
        """Send a message to those of these gateways that are still known."""
        gateways = self._gateways
        for address in addresses:
            if address in gateways:
                self._tell(address, gateways[address], message)

    def _log_if_missed(self, address: str, gateway: _Gateway) -> None:
        """Log each minute that it does not answer."""
        now = time.monotonic()
        if now - gateway.last_heard > MISSED_AFTER_S and now - gateway.missed_at > _MISSED_AGAIN_S:
            gateway.missed_at = now
            log.warning(
                "no answer from a gateway: it is not there, or it refuses this node's key, which its log says",
                gateway=address,
                seconds=round(now - gateway.last_heard),
            )

    def _tell(self, address: str, gateway: _Gateway, message: Message) -> None:
        # At an address that is not listed any more there may be another cluster's process.
        to = gateway.peer.model_copy(update={"address": address})
        self.control.send(to, message, any_boot=gateway.listed)

    def _take_in(self, listed: frozenset[str]) -> None:
        """Add the gateways that are new, and forget those that are neither listed nor heard."""
        now = time.monotonic()
        gateways = {}
        for address in sorted(listed | self._gateways.keys()):
            gateway = self._gateways.get(address)
            gateway = gateway or _Gateway(Peer(role="gateway", address=address, boot_id=_UNKNOWN_BOOT))
            gateway.listed = address in listed
            if gateway.listed or now - gateway.last_heard <= FORGOTTEN_AFTER_S:
                gateways[address] = gateway
            else:
                log.info("gateway forgotten", gateway=address)
        self._gateways = gateways

    def leave(self) -> None:
        """Tell every gateway, now and with every heartbeat, that this node takes no more requests."""
        self._leaving = True
        self.tell(self._gateways, Leaving())


class CacheReports:
    """Tells gateways what a prefix cache has: each update once, and all to one that missed one. One loop calls it."""

    def __init__(self, gateways: Membership, newest: Callable[[int], BlockHashes]) -> None:
        """newest: hashes of at most that many cached blocks, the last used first."""
        self._gateways = gateways
        self._newest = newest
        self._changes: dict[int, bool] = {}
        """By hash, whether the block is cached now. The latest change comes last."""
        self._serial = 0
        self._sent: deque[tuple[float, int]] = deque()
        """When each update was sent that a gateway may not have acknowledged yet."""
        self._due = 0
        """Every gateway should have acknowledged this update by now."""
        self._whole_at: dict[str, float] = {}
        """When each gateway was last sent the whole cache."""
        self._next_at = 0.0

    def stored(self, blocks: StoredBlocks) -> None:
        """Note blocks of one prompt that came into the cache."""
        self._note(blocks.hashes, True)

    def removed(self, hashes: BlockHashes) -> None:
        """Note blocks, uint64 [blocks], that left the cache."""
        self._note(hashes, False)

    def send(self, now: float) -> None:
        """Send what is due. Call it in every turn of the loop."""
        if now < self._next_at:
            return
        self._next_at = now + _REPORT_EVERY_S
        serials = self._gateways.cache_serials()
        if self._changes:
            self._serial += 1
            self._sent.append((now, self._serial))
            self._gateways.tell(serials, self._changed())
            self._changes = {}
        while self._sent and self._sent[0][0] <= now - _ACKNOWLEDGED_WITHIN_S:
            self._due = self._sent.popleft()[1]
        self._whole_at = {address: at for address, at in self._whole_at.items() if at > now - _ACKNOWLEDGED_WITHIN_S}
        outdated = [name for name, serial in serials.items() if serial < self._due and name not in self._whole_at]
        if outdated:
            newest = self._newest(MAX_CACHE_BLOCKS)
            self._gateways.tell(outdated, CacheUpdate.of(self._serial, newest, newest[:0], whole=True))
            self._whole_at |= dict.fromkeys(outdated, now)

    def _note(self, hashes: BlockHashes, present: bool) -> None:
        for name in hashes[::-1].tolist():
            self._changes.pop(name, None)
            self._changes[name] = present

    def _changed(self) -> CacheUpdate:
        """Changes that do not fit are left out: what a gateway does not know costs a hit."""
        newest_first = list(reversed(self._changes.items()))
        gained = [name for name, present in newest_first if present][:MAX_CACHE_BLOCKS]
        lost = [name for name, present in newest_first if not present][:MAX_CACHE_BLOCKS]
        return CacheUpdate.of(self._serial, np.array(gained, dtype=np.uint64), np.array(lost, dtype=np.uint64))
