"""Prefills on other nodes: what they may write to, what has landed, and when slots are safe again.

The slots of an attempt belong to the reservation table from before the prefill node is told of them until they land or
are proved quiet, whatever happens to the request in between. They land when the node says that its last write was
confirmed and the checksums that it sent along, if any, hold. Those of a chunk are verified while later ones are
computed.
"""

import time
from collections.abc import Callable

import structlog

from base.metrics import Metrics
from control.messages import (
    Abort,
    Admitted,
    AttemptId,
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
from decode_node.attempt import AttemptState, Landed, Lost, PrefillAttempt, PrefillOutcome, part_of
from decode_node.health import SILENCE_S, Health
from decode_node.prefill_nodes import PrefillNodes
from decode_node.request import Request, RequestState
from decode_node.verifier import Verification, Verified
from hisparse.extents import HostSlots
from transfer.fencing import ReservationTable

log = structlog.get_logger(__name__)

_INQUIRE_S = 0.5

PrefillMessage = PrefillAccepted | ChunkDone | PrefillDone | PrefillFailed | Quiesced | NotHeld | Progress


class RemotePrefill:
    """Owns reservations, and the requests in state PREFILLING by their attempts. One loop calls it.

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
        self._attempts: dict[AttemptId, PrefillAttempt] = {}
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

    # --- attempts begin and end ---

    def choose(self, request: Request) -> Peer | None:
        """The node to try next for a request, or None if there is none."""
        return self.nodes.choose(request.generate.prefill_nodes, request.tried, request.kv_tokens)

    def dispatch(self, request: Request, node: Peer, slots: HostSlots) -> None:
        """Reserve the slots under a new epoch and ask the node to fill them with the KV of all tokens but the last."""
        request.epoch += 1
        request.prefill_attempts += 1
        request.tried.add(node.boot_id)
        request.move(RequestState.PREFILLING)
        attempt_id = self._id_of(request)
        self._reservations.open(attempt_id, node, slots, len(slots))
        self._attempts[attempt_id] = PrefillAttempt(
            attempt_id, request, node, slots, time.monotonic(), request.kv_tokens
        )
        self.health.begun(node, request.request_id)
        message = PrefillRequest(
            attempt=attempt_id,
            token_ids=request.tokens[:-1],
            destination=self._destination,
            extents=tuple((extent.start, extent.length) for extent in slots.extents),
            hisparse=True,
        )
        self._control.repeat(("prefill", attempt_id), node, message)
        log.info(
            "prefill dispatched",
            request_id=request.request_id,
            epoch=request.epoch,
            node=node.address,
            tokens=request.kv_tokens,
            extents=len(slots.extents),
        )

    def abandon(self, request: Request) -> None:
        """The request no longer wants its prefill: its slots stay in quarantine until the node is quiet."""
        attempt = self._end(self._id_of(request), AttemptState.LOST)
        writer = self._reservations.quarantine(attempt.id, time.monotonic())
        self._control.repeat(("abort", attempt.id), writer, Abort(attempt=attempt.id))

    def _id_of(self, request: Request) -> AttemptId:
        return request.attempt(self._control.me.boot_id)

    def _end(self, attempt_id: AttemptId, state: AttemptState) -> PrefillAttempt:
        attempt = self._attempts.pop(attempt_id)
        attempt.move(state)
        self.health.ended(attempt)
        self._control.answered(("prefill", attempt_id))
        return attempt

    def _land(self, attempt: PrefillAttempt, done: PrefillDone) -> Landed:
        """The slots go on with their request. If something of it lingers, others get them only behind a fence."""
        request = attempt.request
        self._end(attempt.id, AttemptState.LANDED)
        if done.lingering:
            request.host_slots = self._reservations.landed_lingering(attempt.id, time.monotonic())
        else:
            request.host_slots = self._reservations.landed(attempt.id)
        request.tried.clear()
        request.prefill_attempts = 0
        request.move(RequestState.LANDED)
        self._control.send(attempt.node, Admitted(attempt=attempt.id))
        log.info(
            "landed",
            request_id=request.request_id,
            epoch=request.epoch,
            node=attempt.node.address,
            bytes=done.transferred_bytes,
            descriptors=done.descriptors,
            transfer_seconds=round(done.transfer_seconds, 4),
            checksums=attempt.num_checksums,
            lingering=done.lingering,
        )
        return Landed(request)

    def _lose(self, attempt_id: AttemptId, reason: str) -> list[PrefillOutcome]:
        """The node does not work on it any more, which fails an attempt of which it has not said everything yet."""
        attempt = self._attempts.get(attempt_id)
        return self._fail(attempt, reason) if attempt is not None and attempt.needs_node else []

    def _fail(self, attempt: PrefillAttempt, reason: str, kind: str = "prefill") -> list[PrefillOutcome]:
        """End an attempt that is still wanted; its slots go to quarantine. `kind` is what metrics call the reason."""
        request = attempt.request
        self._metrics.transfer_failures.labels(kind).inc()
        self.abandon(request)
        request.move(RequestState.WAITING)
        log.warning("prefill attempt failed", request_id=request.request_id, epoch=request.epoch, reason=reason)
        return [Lost(request, reason)]

    def _hand_back(self, attempt_id: AttemptId, reason: str) -> list[PrefillOutcome]:
        """A node that leaves gives a request back. Nobody is at fault: it is no failure, nor one of its attempts."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or not attempt.needs_node:
            return []
        request = attempt.request
        self.abandon(request)
        request.prefill_attempts -= 1
        request.move(RequestState.WAITING)
        log.info(
            "prefill handed back",
            request_id=request.request_id,
            epoch=request.epoch,
            node=attempt.node.address,
            reason=reason,
        )
        return [Lost(request, reason)]

    # --- what prefill nodes say ---

    def take(self, sender: Peer, message: PrefillMessage) -> list[PrefillOutcome]:
        """Act on a prefill node's message. Of an attempt, only the node that was asked for it may speak."""
        match message:
            case Progress():
                self._on_progress(sender, message)
                return []
            case NotHeld():
                ids = message.attempts
            case _:
                ids = (message.attempt,)
        return [outcome for id_ in ids if self._may_speak(sender, id_) for outcome in self._on(sender, id_, message)]

    def _may_speak(self, sender: Peer, attempt_id: AttemptId) -> bool:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.node.boot_id == sender.boot_id:
            return True
        log.warning(
            "from a node that was not asked",
            request_id=attempt_id.request_id,
            epoch=attempt_id.epoch,
            node=sender.address,
        )
        return False

    def _on(self, sender: Peer, attempt_id: AttemptId, message: PrefillMessage) -> list[PrefillOutcome]:
        outcomes: list[PrefillOutcome] = []
        match message:
            case PrefillAccepted():
                self._control.answered(("prefill", attempt_id))
                if attempt_id in self._attempts:
                    self._attempts[attempt_id].accept(time.monotonic())
            case ChunkDone() | PrefillDone():
                outcomes = self._on_arrival(sender, attempt_id, message)
            case PrefillFailed(leaving=True):
                self.nodes.retire(sender.boot_id)
                outcomes = self._hand_back(attempt_id, message.reason)
                self._on_failed(sender, attempt_id, message)
            case PrefillFailed():
                if attempt_id in self._attempts and not message.refused:
                    self.health.failed(sender, attempt_id.request_id)
                outcomes = self._lose(attempt_id, message.reason)
                self._on_failed(sender, attempt_id, message)
            case Quiesced():
                outcomes = self._lose(attempt_id, "the prefill node gave it up")
                self._on_quiesced(sender, attempt_id, message.lingering)
            case NotHeld():
                outcomes = self._lose(attempt_id, "the prefill node does not know it")
                self._on_quiesced(sender, attempt_id)
        return outcomes

    def _on_progress(self, sender: Peer, message: Progress) -> None:
        self.health.note_pass(sender, message.current_pass)
        for attempt_id, computed in message.computed:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None and attempt.node.boot_id == sender.boot_id:
                attempt.note_progress(computed, message.current_pass, time.monotonic())

    def _on_arrival(
        self, sender: Peer, attempt_id: AttemptId, message: ChunkDone | PrefillDone
    ) -> list[PrefillOutcome]:
        """A chunk has landed, or all of it has."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            self._answer_late(sender, attempt_id, message)
            return []
        if contradiction := attempt.contradiction(message):
            return self._fail(attempt, contradiction)
        if not self._is_taken(attempt, message):
            return []
        if isinstance(message, ChunkDone):
            self._control.send(sender, ChunkTaken(attempt=attempt_id, number=message.number))
        return self._land_if_verified(attempt)

    def _is_taken(self, attempt: PrefillAttempt, message: ChunkDone | PrefillDone) -> bool:
        """Whether what the message says will be verified. If not, the verifier is too busy: it will be said again."""
        part = part_of(message)
        if attempt.has(part):
            return True
        if message.checksums and not self._verify(Verification(attempt, part, message.checksums)):
            return False
        attempt.accept(time.monotonic())
        attempt.take(message, time.monotonic())
        return True

    def _answer_late(self, sender: Peer, attempt_id: AttemptId, message: ChunkDone | PrefillDone) -> None:
        """Of an attempt that has landed or was given up: nothing is taken, and nothing need be said again."""
        if isinstance(message, ChunkDone):
            self._control.send(sender, ChunkTaken(attempt=attempt_id, number=message.number))
        else:
            # Its last write landed, which is as good as Quiesced.
            self._on_quiesced(sender, attempt_id, message.lingering)
            self._control.send(sender, Admitted(attempt=attempt_id))

    def verified(self, result: Verified) -> list[PrefillOutcome]:
        """Take what came of a verification; nothing happens if the attempt was given up meanwhile."""
        attempt = self._attempts.get(result.attempt_id)
        if attempt is None:
            return []
        if result.reason is None:
            attempt.verified(result.part)
            return self._land_if_verified(attempt)
        if not result.mismatches:
            return self._fail(attempt, result.reason, "verification")
        log.error(
            "transferred KV is not what was sent",
            request_id=attempt.id.request_id,
            epoch=attempt.id.epoch,
            node=attempt.node.address,
            mismatches=len(result.mismatches),
            checksums=result.num_checksums,
            first=result.examples(),
        )
        self.health.failed(attempt.node, attempt.id.request_id)
        return self._fail(attempt, result.reason, "checksum")

    def _land_if_verified(self, attempt: PrefillAttempt) -> list[PrefillOutcome]:
        return [self._land(attempt, attempt.done)] if attempt.done is not None and attempt.is_verified else []

    def _on_failed(self, sender: Peer, attempt_id: AttemptId, message: PrefillFailed) -> None:
        """The sender has given it up. With writes in flight that lifts no quarantine, and it waits for an Abort."""
        if not message.in_flight:
            self._on_quiesced(sender, attempt_id, message.lingering)
        elif attempt_id not in self._reservations:
            self._control.send(sender, Abort(attempt=attempt_id))

    def _on_quiesced(self, sender: Peer, attempt_id: AttemptId, lingering: bool = False) -> None:
        """The sender has nothing of it in flight. That counts only if it is the writer itself."""
        where = {"request_id": attempt_id.request_id, "epoch": attempt_id.epoch}
        if lingering:
            if self._reservations.lingers(attempt_id, sender.boot_id, time.monotonic()):
                self._control.answered(("abort", attempt_id))
                log.info("quiet, but for what the network may still carry", **where)
        elif self._reservations.quiesced(attempt_id, sender.boot_id):
            self._control.answered(("abort", attempt_id))
            log.info("quarantine lifted", **where)

    # --- what is watched ---

    def tick(self, now: float) -> list[PrefillOutcome]:
        """Watch writers, give up on those that are unwell and release what has become safe."""
        for attempt_id in self._reservations.release_expired(now):
            self._control.answered(("abort", attempt_id))
            log.info("what may have lingered is fenced off", request_id=attempt_id.request_id, epoch=attempt_id.epoch)
        if now < self._inquire_at:
            return []
        self._inquire_at = now + _INQUIRE_S
        self._control.watch(self.nodes.known | {reservation.writer for reservation in self._reservations})
        outcomes: list[PrefillOutcome] = []
        for attempt_id, attempt in list(self._attempts.items()):
            if attempt.needs_node and (trouble := self.health.trouble(attempt, now)):
                outcomes += self._lose(attempt_id, trouble)
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
        asked: dict[Peer, list[AttemptId]] = {node: [] for node in self.health.stuck & self.nodes.known}
        for attempt in self._attempts.values():
            if attempt.state is AttemptState.ACCEPTED:
                asked.setdefault(attempt.node, []).append(attempt.id)
        for node, attempts in asked.items():
            self._control.send(node, Holding(attempts=tuple(attempts)))
