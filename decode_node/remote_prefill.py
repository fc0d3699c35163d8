"""Prefills on other nodes: what they may write to, what has landed, and when slots are safe again.

Every attempt has an epoch of its own. Its slots belong to the reservation table from before the prefill node is told
of them until they land or are proved quiet, whatever happens to the request in between. They land when the node says
that its last write was confirmed and the checksums that it sent along, if any, hold. Those of a chunk are verified
while later ones are computed.
"""

import time
from collections.abc import Callable

import structlog

from base.metrics import Metrics
from control.messages import (
    Abort,
    Admitted,
    ChunkDone,
    ChunkTaken,
    Destination,
    Holding,
    NotHeld,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Progress,
    Quiesced,
)
from control.plane import ControlPlane
from decode_node.arrival import Stage, part_of
from decode_node.attempt import Attempt, Landed, Lost, Outcome
from decode_node.health import SILENCE_S, Health
from decode_node.prefill_nodes import PrefillNodes
from decode_node.request import Request, State
from decode_node.verifier import Verification, Verified
from hisparse.extents import HostSlots
from transfer.fencing import Key, ReservationTable

log = structlog.get_logger(__name__)

_INQUIRE_S = 0.5

PrefillMessage = PrefillAccepted | ChunkDone | PrefillDone | PrefillFailed | Quiesced | NotHeld | Progress


class RemotePrefill:
    """Owns reservations and the requests in state PREFILLING. One loop calls it.

    `verify` takes checksums to be verified elsewhere, whose result comes to `verified`; False if it is too busy.
    `patience`: seconds without acceptance or progress after which an attempt is given up.
    """

    def __init__(
        self,
        control: ControlPlane,
        destination: Destination,
        reservations: ReservationTable[HostSlots],
        verify: Callable[[Verification], bool],
        metrics: Metrics,
        patience: float,
    ) -> None:
        self.health = Health(control, patience)
        self.nodes = PrefillNodes(control, self.health)
        self._control = control
        self._destination = destination
        self._reservations = reservations
        self._verify = verify
        self._metrics = metrics
        self._attempts: dict[Key, Attempt] = {}
        self._inquire_at = 0.0

    @property
    def quarantined_slots(self) -> int:
        return self._reservations.quarantined_slots

    def quarantine_seconds(self, now: float) -> float:
        """For how long the oldest quarantined slots have been so; 0 if there are none."""
        return max((now - (r.quarantined_at or now) for r in self._reservations.quarantined), default=0.0)

    @property
    def is_idle(self) -> bool:
        return not self._attempts and not len(self._reservations)

    @property
    def written_to(self) -> bool:
        """Whether a prefill node that was heard lately may be writing to this node's memory."""
        now = time.monotonic()
        writers = {reservation.writer.boot_id for reservation in self._reservations if reservation.may_be_posted_to}
        return any(now - (self._control.last_heard(boot_id) or 0.0) < SILENCE_S for boot_id in writers)

    def choose(self, request: Request) -> Peer | None:
        """The node to try next for a request, or None if there is none."""
        return self.nodes.choose(request.generate.prefill_nodes, request.tried, request.num_tokens)

    def dispatch(self, request: Request, node: Peer, slots: HostSlots) -> None:
        """Reserve the slots under a new epoch and ask the node to fill them."""
        request.epoch += 1
        request.prefill_attempts += 1
        request.tried.add(node.boot_id)
        request.move(State.PREFILLING)
        self._reservations.open(request.key, node, slots, len(slots))
        self._attempts[request.key] = Attempt(request, node, slots, time.monotonic())
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
        writer = self._reservations.quarantine(key, time.monotonic())
        self._control.repeat(("abort", key), writer, Abort(request_id=key[0], epoch=key[1]))

    def take(self, sender: Peer, message: PrefillMessage) -> list[Outcome]:
        """Act on a prefill node's message. Of an attempt, only the node that was asked for it may speak."""
        match message:
            case Progress():
                self._on_progress(sender, message)
                return []
            case NotHeld():
                keys: tuple[Key, ...] = message.keys
            case _:
                keys = ((message.request_id, message.epoch),)
        return [outcome for key in keys if self._may_speak(sender, key) for outcome in self._on(sender, key, message)]

    def _may_speak(self, sender: Peer, key: Key) -> bool:
        attempt = self._attempts.get(key)
        if attempt is None or attempt.node.boot_id == sender.boot_id:
            return True
        log.warning("from a node that was not asked", request_id=key[0], epoch=key[1], node=sender.address)
        return False

    def _on(self, sender: Peer, key: Key, message: PrefillMessage) -> list[Outcome]:
        outcomes: list[Outcome] = []
        match message:
            case PrefillAccepted():
                self._control.answered(("prefill", key))
                if key in self._attempts:
                    self._attempts[key].accept(time.monotonic())
            case ChunkDone() | PrefillDone():
                outcomes = self._on_arrival(sender, key, message)
            case PrefillFailed(leaving=True):
                self.nodes.retire(sender.boot_id)
                outcomes = self._hand_back(key, message.reason)
                self._on_failed(sender, key, message)
            case PrefillFailed():
                outcomes = self._lose(key, message.reason)
                self._on_failed(sender, key, message)
            case Quiesced():
                outcomes = self._lose(key, "the prefill node gave it up")
                self._on_quiesced(sender, key, message.lingering)
            case NotHeld():
                outcomes = self._lose(key, "the prefill node does not know it")
                self._on_quiesced(sender, key)
        return outcomes

    def verified(self, result: Verified) -> list[Outcome]:
        """Take what came of a verification; nothing happens if the attempt was given up meanwhile."""
        attempt = self._attempts.get(result.key)
        if attempt is None:
            return []
        if result.reason is None:
            attempt.arrival.verified(result.part)
            return self._land_if_verified(result.key, attempt)
        if not result.mismatches:
            return self._fail(result.key, result.reason, "verification")
        log.error(
            "transferred KV is not what was sent",
            request_id=result.key[0],
            epoch=result.key[1],
            node=attempt.node.address,
            mismatches=len(result.mismatches),
            checksums=result.num_checksums,
            first=result.examples(),
        )
        return self._fail(result.key, result.reason, "checksum")

    def tick(self, now: float) -> list[Outcome]:
        """Watch writers, give up on those that are unwell and release what has become safe."""
        for key in self._reservations.release_expired(now):
            self._control.answered(("abort", key))
            log.info("what may have lingered is fenced off", request_id=key[0], epoch=key[1])
        if now < self._inquire_at:
            return []
        self._inquire_at = now + _INQUIRE_S
        self._control.watch(self.nodes.known | {reservation.writer for reservation in self._reservations})
        outcomes: list[Outcome] = []
        for key, attempt in list(self._attempts.items()):
            if attempt.needs_node and (trouble := self.health.trouble(attempt, now)):
                outcomes += self._lose(key, trouble)
        self._bury(now)
        self._inquire()
        return outcomes

    def _bury(self, now: float) -> None:
        """Begin the grace of slots whose writer is proved dead."""
        for quarantined in self._reservations.quarantined:
            asked_after = quarantined.quarantined_at or now
            if quarantined.free_after is None and self.health.is_dead(quarantined.writer, asked_after):
                self._reservations.writer_died(quarantined.writer.boot_id, now)

    def _inquire(self) -> None:
        """Ask nodes how far they are."""
        keys: dict[Peer, list[Key]] = {node: [] for node in self.health.stuck & self.nodes.known}
        for key, attempt in self._attempts.items():
            if attempt.accepted and attempt.needs_node:
                keys.setdefault(attempt.node, []).append(key)
        for node, theirs in keys.items():
            self._control.send(node, Holding(keys=tuple(theirs)))

    def _on_progress(self, sender: Peer, message: Progress) -> None:
        self.health.note_pass(sender, message.current_pass)
        for request_id, epoch, computed in message.computed:
            attempt = self._attempts.get((request_id, epoch))
            if attempt is not None and attempt.node.boot_id == sender.boot_id:
                attempt.note_progress(computed, message.current_pass, time.monotonic())

    def _on_arrival(self, sender: Peer, key: Key, message: ChunkDone | PrefillDone) -> list[Outcome]:
        """A chunk has landed, or all of it has."""
        attempt = self._attempts.get(key)
        if attempt is None:
            self._answer_late(sender, key, message)
            return []
        if contradiction := attempt.arrival.contradiction(message):
            return self._fail(key, contradiction)
        if not self._is_taken(key, attempt, message):
            return []
        if isinstance(message, ChunkDone):
            self._control.send(sender, _taken(message))
        return self._land_if_verified(key, attempt)

    def _is_taken(self, key: Key, attempt: Attempt, message: ChunkDone | PrefillDone) -> bool:
        """Whether what the message says will be verified. If not, the verifier is too busy: it will be said again."""
        part = part_of(message)
        if attempt.arrival.has(part):
            return True
        verification = Verification(key, part, message.checksums, attempt.placement)
        if message.checksums and not self._verify(verification):
            return False
        attempt.take(message, time.monotonic())
        return True

    def _answer_late(self, sender: Peer, key: Key, message: ChunkDone | PrefillDone) -> None:
        """Of an attempt that has landed or was given up: nothing is taken, and nothing need be said again."""
        if isinstance(message, ChunkDone):
            self._control.send(sender, _taken(message))
        else:
            # Its last write landed, which is as good as Quiesced.
            self._on_quiesced(sender, key, message.lingering)
            self._control.send(sender, Admitted(request_id=key[0], epoch=key[1]))

    def _land_if_verified(self, key: Key, attempt: Attempt) -> list[Outcome]:
        done = attempt.arrival.done
        if done is None or attempt.arrival.stage is not Stage.VERIFIED:
            return []
        return [self._land(key, attempt, done)]

    def _land(self, key: Key, attempt: Attempt, message: PrefillDone) -> Landed:
        """The slots go on with their request. If something of it lingers, others get them only behind a fence."""
        request = attempt.request
        self._forget(key)
        if message.lingering:
            request.host_slots = self._reservations.landed_lingering(key, time.monotonic())
        else:
            request.host_slots = self._reservations.landed(key)
        request.tried.clear()
        request.prefill_attempts = 0
        request.move(State.LANDED)
        self._control.send(attempt.node, Admitted(request_id=key[0], epoch=key[1]))
        log.info(
            "landed",
            request_id=request.request_id,
            epoch=request.epoch,
            node=attempt.node.address,
            bytes=message.transferred_bytes,
            descriptors=message.descriptors,
            transfer_seconds=round(message.transfer_seconds, 4),
            checksums=attempt.arrival.num_checksums,
            lingering=message.lingering,
        )
        return Landed(request, message.token)

    def _on_failed(self, sender: Peer, key: Key, message: PrefillFailed) -> None:
        """The sender has given it up. With writes in flight that lifts no quarantine, and it waits for an Abort."""
        if not message.in_flight:
            self._on_quiesced(sender, key, message.lingering)
        elif key not in self._reservations:
            self._control.send(sender, Abort(request_id=key[0], epoch=key[1]))

    def _on_quiesced(self, sender: Peer, key: Key, lingering: bool = False) -> None:
        """The sender has nothing of it in flight. That counts only if it is the writer itself."""
        if lingering:
            if self._reservations.lingers(key, sender.boot_id, time.monotonic()):
                self._control.answered(("abort", key))
                log.info("quiet, but for what the network may still carry", request_id=key[0], epoch=key[1])
        elif self._reservations.quiesced(key, sender.boot_id):
            self._control.answered(("abort", key))
            log.info("quarantine lifted", request_id=key[0], epoch=key[1])

    def _lose(self, key: Key, reason: str) -> list[Outcome]:
        """The node does not work on it any more, which fails an attempt of which it has not said everything yet."""
        attempt = self._attempts.get(key)
        return self._fail(key, reason) if attempt is not None and attempt.needs_node else []

    def _fail(self, key: Key, reason: str, kind: str = "prefill") -> list[Outcome]:
        """End an attempt that is still wanted; its slots go to quarantine. `kind` is what metrics call the reason."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        request = attempt.request
        self._metrics.transfer_failures.labels(kind).inc()
        self.abandon(request)
        request.move(State.WAITING)
        log.warning("prefill attempt failed", request_id=key[0], epoch=key[1], reason=reason)
        return [Lost(request, reason)]

    def _hand_back(self, key: Key, reason: str) -> list[Outcome]:
        """A node that leaves gives a request back. Nobody is at fault: it is no failure, nor one of its attempts."""
        attempt = self._attempts.get(key)
        if attempt is None or not attempt.needs_node:
            return []
        request = attempt.request
        self.abandon(request)
        request.prefill_attempts -= 1
        request.move(State.WAITING)
        log.info("prefill handed back", request_id=key[0], epoch=key[1], node=attempt.node.address, reason=reason)
        return [Lost(request, reason)]

    def _forget(self, key: Key) -> None:
        self._control.answered(("prefill", key))
        del self._attempts[key]


def _taken(message: ChunkDone) -> ChunkTaken:
    return ChunkTaken(request_id=message.request_id, epoch=message.epoch, number=message.number)
