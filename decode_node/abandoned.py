"""Attempts that were given up, until nothing can write to their slots any more."""

import time

import structlog

from control.messages import Abort, AttemptId, Peer, PrefillFailed
from control.plane import ControlPlane
from decode_node.health import SILENCE_S, Health
from kvcache.extents import HostSlots
from transfer.fencing import ReservationTable

log = structlog.get_logger(__name__)


class AbandonedAttempts:
    """Keeps their slots in quarantine, and repeats `Abort` to the prefill node until it says that it has stopped.

    The other way out of quarantine is the proof that the prefill node is dead. One loop calls it.
    """

    def __init__(
        self, control: ControlPlane, reservations: ReservationTable[AttemptId, Peer, HostSlots], health: Health
    ) -> None:
        self._control = control
        self._reservations = reservations
        self._health = health

    @property
    def num_slots(self) -> int:
        return self._reservations.quarantined_slots

    def fresh_slots(self, seconds: float) -> int:
        """Slots that have been in quarantine for less than that."""
        since = time.monotonic() - seconds
        return sum(r.num_slots for r in self._reservations.quarantined if (r.quarantined_at or 0.0) > since)

    def oldest_seconds(self, now: float) -> float:
        """How long the oldest slots have been in quarantine; 0 if there are none."""
        return max((now - (r.quarantined_at or now) for r in self._reservations.quarantined), default=0.0)

    @property
    def written_to(self) -> bool:
        """Whether a prefill node that was heard lately may be writing to this node's memory."""
        now = time.monotonic()
        writers = {writer.peer.boot_id for r in self._reservations for writer in r.writers if writer.may_post}
        return any(now - (self._control.last_heard(boot_id) or 0.0) < SILENCE_S for boot_id in writers)

    def add(self, attempt_id: AttemptId) -> None:
        """Quarantine the slots of an attempt and have its prefill node stop."""
        node = self._reservations.quarantine(attempt_id, time.monotonic())
        self._control.repeat(("abort", attempt_id), node, Abort(attempt=attempt_id))

    def on_failed(self, sender: Peer, message: PrefillFailed) -> None:
        """The prefill node gave the attempt up. With writes in flight the quarantine goes on and it awaits `Abort`."""
        if not message.in_flight:
            self.on_quiesced(sender, message.attempt, message.lingering)
        elif message.attempt not in self._reservations:
            self._control.send(sender, Abort(attempt=message.attempt))

    def on_quiesced(self, sender: Peer, attempt_id: AttemptId, lingering: bool = False) -> None:
        """The sender has nothing of the attempt in flight. That counts if it is the node or one of its ranks."""
        if self._reservations.quiesced(attempt_id, sender.boot_id, time.monotonic(), lingering):
            self._control.answered(("abort", attempt_id))
            log.info("prefill node has stopped writing", lingering=lingering, **attempt_id.log_fields)

    def release_expired(self, now: float) -> None:
        """Release the slots that a fence protects from what may linger. To be called in every turn of the loop."""
        for attempt_id in self._reservations.release_expired(now):
            self._control.answered(("abort", attempt_id))
            log.info("what may have lingered is fenced off", **attempt_id.log_fields)

    def look_for_dead_writers(self, now: float) -> None:
        """Begin the grace of writers that are proved dead, each by itself."""
        for quarantined in self._reservations.quarantined:
            asked_after = quarantined.quarantined_at or now
            for writer in quarantined.writers:
                if writer.may_post and self._health.is_dead(writer.peer, asked_after):
                    self._reservations.writer_died(writer.peer.boot_id, now)
