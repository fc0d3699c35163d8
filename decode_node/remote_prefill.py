"""Prefills on other nodes: which node, what it may write to, and when those slots are safe again.

Every attempt has an epoch of its own. Its slots belong to the reservation table from before the prefill node is told
of them until they land or are proved quiet, whatever happens to the request in between.
"""

import time
from dataclasses import dataclass

import structlog

from decode_node.request import Request, State
from hisparse.extents import HostSlots
from service.metrics import Metrics
from transfer.control import ControlPlane
from transfer.fencing import Key, ReservationTable
from transfer.messages import (
    Abort,
    Admitted,
    Destination,
    Holding,
    NotHeld,
    Peer,
    Pong,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Quiesced,
    Token,
)

log = structlog.get_logger(__name__)

SILENCE_S = 3.0
_INQUIRE_S = 0.5


@dataclass(frozen=True)
class Landed:
    """The prompt's KV is in host memory and the first token is known."""

    request: Request
    token: Token


@dataclass(frozen=True)
class Lost:
    """The attempt failed; the request holds nothing any more."""

    request: Request
    reason: str


@dataclass
class _Attempt:
    """One dispatched prefill. `accepted`: the node has said that it works on it."""

    request: Request
    dispatched_at: float
    accepted: bool = False


Outcome = Landed | Lost
PrefillMessage = PrefillAccepted | PrefillDone | PrefillFailed | Quiesced | NotHeld | Pong


class RemotePrefill:
    """Owns reservations and the requests in state PREFILLING. One loop calls it."""

    def __init__(
        self,
        control: ControlPlane,
        destination: Destination,
        reservations: ReservationTable[HostSlots],
        metrics: Metrics,
    ) -> None:
        self._control = control
        self._destination = destination
        self._reservations = reservations
        self._metrics = metrics
        self._attempts: dict[Key, _Attempt] = {}
        self._nodes: dict[str, tuple[Peer, ...]] = {}
        self._suspects: dict[str, float] = {}
        self._inquire_at = 0.0

    @property
    def quarantined_slots(self) -> int:
        return self._reservations.quarantined_slots

    @property
    def is_idle(self) -> bool:
        return not self._attempts and not len(self._reservations)

    def learn(self, gateway: str, nodes: tuple[Peer, ...]) -> None:
        """The prefill nodes that a gateway knows, in order of preference."""
        self._nodes[gateway] = nodes

    def choose(self, request: Request) -> Peer | None:
        """The next node to try, or None if there is none.

        The request's own ranking comes first, as far as gateways still know the nodes; then what else they know; a
        node that no gateway names any more comes last.
        """
        current = {node.address: node for nodes in self._nodes.values() for node in nodes}
        ranking = request.generate.prefill_nodes
        ranked = [current[node.address] for node in ranking if node.address in current]
        ranked += [*current.values(), *(node for node in ranking if node.address not in current)]
        usable = [node for node in ranked if not self._is_suspect(node)]
        untried = [node for node in usable if node.boot_id not in request.tried]
        return next(iter(untried or usable), None)

    def dispatch(self, request: Request, node: Peer, slots: HostSlots) -> None:
        """Reserve the slots under a new epoch and ask the node to fill them."""
        request.epoch += 1
        request.prefill_attempts += 1
        request.tried.add(node.boot_id)
        request.move(State.PREFILLING)
        self._reservations.open(request.key, node, slots, len(slots))
        self._attempts[request.key] = _Attempt(request, time.monotonic())
        message = PrefillRequest(
            request_id=request.request_id,
            epoch=request.epoch,
            prompt_ids=request.tokens,
            step=len(request.generated),
            sampling=request.generate.sampling,
            destination=self._destination,
            extents=tuple((extent.start, extent.length) for extent in slots.extents),
            hisparse=True,
        )
        self._control.repeat(("prefill", request.key), node, message)
        log.info(
            "prefill dispatched",
            request_id=request.request_id,
            epoch=request.epoch,
            node=node.address,
            tokens=request.num_tokens,
            extents=len(slots.extents),
        )

    def abandon(self, request: Request) -> None:
        """The request no longer wants its prefill: its slots stay in quarantine until the node is quiet."""
        key = request.key
        self._forget(key)
        writer = self._reservations.quarantine(key)
        # Whoever has the address may answer: another boot there proves that the writer is dead.
        abort = Abort(request_id=key[0], epoch=key[1])
        self._control.repeat(("abort", key), writer, abort, any_boot=True)

    def take(self, sender: Peer, message: PrefillMessage) -> list[Outcome]:
        """Act on a prefill node's message."""
        outcomes = self._notice_restart(sender)
        match message:
            case PrefillAccepted():
                key = message.request_id, message.epoch
                self._control.answered(("prefill", key))
                if key in self._attempts:
                    self._attempts[key].accepted = True
            case PrefillDone():
                outcomes += self._on_done(sender, message)
            case PrefillFailed():
                key = message.request_id, message.epoch
                outcomes += self._fail(key, message.reason)
                self._on_quiesced(sender, key)
            case Quiesced():
                key = message.request_id, message.epoch
                outcomes += self._fail(key, "the prefill node gave it up")
                self._on_quiesced(sender, key)
            case NotHeld():
                for key in message.keys:
                    outcomes += self._fail(key, "the prefill node does not know it")
                    self._on_quiesced(sender, key)
        return outcomes

    def tick(self, now: float) -> list[Outcome]:
        """Watch writers, give up silent ones and release what has become safe."""
        for key in self._reservations.release_expired(now):
            self._control.answered(("abort", key))
            log.info("slots of a dead prefill node are free again", request_id=key[0], epoch=key[1])
        if now < self._inquire_at:
            return []
        self._inquire_at = now + _INQUIRE_S
        outcomes: list[Outcome] = []
        known = {node for nodes in self._nodes.values() for node in nodes}
        self._control.watch(known | {reservation.writer for reservation in self._reservations})
        for writer, keys in self._writable_by_writer().items():
            self._control.send(writer, Holding(keys=tuple(key for key in keys if self._attempts[key].accepted)))
            for key in keys:
                heard = max(self._control.last_heard(writer.boot_id) or 0.0, self._attempts[key].dispatched_at)
                if now - heard > SILENCE_S:
                    self._suspects[writer.boot_id] = now
                    outcomes += self._fail(key, f"prefill node {writer.address} is silent")
        return outcomes

    def _writable_by_writer(self) -> dict[Peer, list[Key]]:
        grouped: dict[Peer, list[Key]] = {}
        for reservation in self._reservations:
            if self._reservations.is_writable(reservation.key):
                grouped.setdefault(reservation.writer, []).append(reservation.key)
        return grouped

    def _on_done(self, sender: Peer, message: PrefillDone) -> list[Outcome]:
        key = message.request_id, message.epoch
        if not self._reservations.is_writable(key):
            # Of an attempt that was given up. Its last write landed, which is as good as Quiesced.
            self._on_quiesced(sender, key)
            self._control.send(sender, Admitted(request_id=key[0], epoch=key[1]))
            return []
        request = self._attempts[key].request
        if message.num_tokens != request.num_tokens:
            return self._fail(key, f"prefill covered {message.num_tokens} tokens, not {request.num_tokens}")
        self._forget(key)
        request.host_slots = self._reservations.landed(key)
        request.tried.clear()
        request.prefill_attempts = 0
        request.move(State.LANDED)
        self._control.send(sender, Admitted(request_id=key[0], epoch=key[1]))
        log.info(
            "landed",
            request_id=request.request_id,
            epoch=request.epoch,
            node=sender.address,
            bytes=message.transferred_bytes,
            descriptors=message.descriptors,
            transfer_seconds=round(message.transfer_seconds, 4),
        )
        return [Landed(request, message.token)]

    def _on_quiesced(self, sender: Peer, key: Key) -> None:
        """The sender has nothing of it in flight. That counts at once only if it is the writer itself.

        From another boot at the writer's address it proves a death, which `_notice_restart` has taken note of.
        """
        if self._reservations.quiesced(key, sender.boot_id):
            self._control.answered(("abort", key))
            log.info("quarantine lifted", request_id=key[0], epoch=key[1])

    def _fail(self, key: Key, reason: str) -> list[Outcome]:
        """End an attempt that is still wanted; its slots go to quarantine."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        request = attempt.request
        self._metrics.transfer_failures.labels("prefill").inc()
        self.abandon(request)
        request.move(State.WAITING)
        log.warning("prefill attempt failed", request_id=key[0], epoch=key[1], reason=reason)
        return [Lost(request, reason)]

    def _notice_restart(self, sender: Peer) -> list[Outcome]:
        """A process with another boot id at a writer's address proves the writer dead."""
        dead = {
            r.writer.boot_id
            for r in self._reservations
            if r.writer.address == sender.address and r.writer.boot_id != sender.boot_id
        }
        return [
            outcome
            for boot_id in dead
            for key in self._reservations.writer_died(boot_id, time.monotonic())
            for outcome in self._fail(key, f"prefill node {sender.address} was restarted")
        ]

    def _forget(self, key: Key) -> None:
        self._control.answered(("prefill", key))
        del self._attempts[key]

    def _is_suspect(self, node: Peer) -> bool:
        """Whether the node was silent and has not been heard since."""
        since = self._suspects.get(node.boot_id)
        if since is None:
            return False
        heard = self._control.last_heard(node.boot_id)
        if heard is not None and heard > since:
            del self._suspects[node.boot_id]
            return False
        return time.monotonic() - since < 10 * SILENCE_S
