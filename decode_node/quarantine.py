"""Quarantine: slots of lost attempts, until no process can write to them or read them any more.

They are free when the prefill node says that it has stopped, or is proved dead. If it is gone and no process takes its
address, an operator evicts it over HTTP, since silence proves nothing. The node's loop carries out what operators ask.
"""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import structlog
from fastapi import APIRouter, Depends, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from control.messages import Abort, AttemptId, Peer, PrefillFailed
from control.plane import ControlPlane
from decode_node.prefill_nodes import SILENCE_S, PrefillNodes
from decode_node.prefix_reads import PrefixReads
from decode_node.quarantine_report import DANGER, Eviction, QuarantinedReservation, QuarantineList
from transfer.fencing import ReservationTable

log = structlog.get_logger(__name__)

Result = TypeVar("Result")


class Quarantine:
    """Repeats `Abort` to the prefill nodes of abandoned attempts, and has their slots released. One loop calls it.

    reads: leases of attempts that have ended are listed and evicted with the slots that are written to.
    """

    def __init__(
        self,
        control: ControlPlane,
        reservations: ReservationTable[AttemptId, Peer, Any],
        nodes: PrefillNodes,
        reads: PrefixReads,
    ) -> None:
        self._control = control
        self._reservations = reservations
        self._nodes = nodes
        self._reads = reads

    @property
    def num_slots(self) -> int:
        return sum(r.num_slots for r in self._reservations.quarantined)

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
                if writer.may_post and self._nodes.is_dead(writer.peer, asked_after):
                    self._reservations.writer_gone(writer.peer.boot_id, now)

    # --- for the operator ---

    def list(self) -> QuarantineList:
        """All quarantined reservations with the processes that they wait for, oldest first.

        So, too, prefixes that are leased to attempts that have ended.
        """
        now = time.monotonic()

        def entry(key: AttemptId, slots: int, since: float | None, peer: Peer, **more: Any) -> QuarantinedReservation:
            heard = self._control.last_heard(peer.boot_id)
            return QuarantinedReservation(
                request_id=key.request_id,
                epoch=key.epoch,
                slots=slots,
                quarantined_s=now - (since or now),
                writer=peer.address,
                boot_id=peer.boot_id,
                last_heard_s=None if heard is None else now - heard,
                **more,
            )

        found = [
            entry(r.key, r.num_slots, r.quarantined_at, writer.peer, free_in_s=writer.seconds_left(now))
            for r in self._reservations.quarantined
            for writer in r.writers
        ]
        found += [
            entry(attempt.id, len(lease.slots), attempt.ended_at, reader, access="reads", free_in_s=None)
            for attempt, lease in self._reads.orphaned
            for reader in lease.readers
        ]
        return QuarantineList(reservations=sorted(found, key=lambda reservation: -reservation.quarantined_s))

    def evict(self, boot_id: str, force: bool = False) -> Eviction:
        """Free, after the drain grace, what is quarantined for a process that is gone for good.

        If that process still writes, it corrupts the memory of other requests. So one that was heard within the last
        SILENCE_S seconds is evicted only with `force`. Raises HTTPException and changes nothing: 404 if nothing is
        quarantined for that boot id, 409 if the process lives.
        """
        now = time.monotonic()
        mine = [r for r in self._reservations.quarantined if r.writers_of(boot_id)]
        writers = [writer for r in mine for writer in r.writers_of(boot_id)]
        leases = [lease for _, lease in self._reads.orphaned if lease.readers_of(boot_id)]
        if not mine and not leases:
            raise HTTPException(404, f"nothing is in quarantine for boot id {boot_id}")
        peer = writers[0].peer if writers else leases[0].readers_of(boot_id)[0]
        heard = self._control.last_heard(boot_id)
        if heard is not None and now - heard < SILENCE_S and not force:
            raise HTTPException(
                409,
                f"{peer.address} (boot id {boot_id}) was heard {now - heard:.1f} s ago, and {DANGER}; "
                "stop it first, or force the eviction",
            )
        self._reservations.writer_gone(boot_id, now)
        self._reads.evict(boot_id)
        eviction = Eviction(
            boot_id=boot_id,
            reservations=len(mine) + len(leases),
            slots=sum(reservation.num_slots for reservation in mine) + sum(len(lease.slots) for lease in leases),
            free_in_s=max((writer.seconds_left(now) or 0.0 for writer in writers), default=0.0),
            also_written_by=sorted({writer.peer.boot_id for r in mine for writer in r.writers if writer.may_post}),
            also_read_by=sorted({reader.boot_id for lease in leases for reader in lease.readers}),
        )
        log.warning("evicted by an operator", forced=force, **eviction.model_dump(exclude={"warning"}))
        return eviction


@dataclass(frozen=True)
class LoopCall:
    """An action in the node's inbox. `run` never raises."""

    run: Callable[[], None]


def on_loop(post: Callable[[LoopCall], None], action: Callable[[], Result], timeout: float) -> Result:
    """Have the loop run `action`, and wait for its result or its exception.

    post: puts an event into the loop's inbox. Raises HTTPException (503) if the loop did not begin the action within
    `timeout` seconds. Then it never will.
    """
    result: Future[Result] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(action())
        except Exception as error:
            result.set_exception(error)

    post(LoopCall(run))
    try:
        return result.result(timeout)
    except TimeoutError:
        if result.cancel():
            reason = f"the node's loop did not answer within {timeout:g} s; nothing was evicted"
            raise HTTPException(503, reason) from None
        return result.result()


def quarantine_router(
    quarantine: Quarantine,
    post: Callable[[LoopCall], None],
    timeout: float = 10.0,
    token: str | None = None,
) -> APIRouter:
    """GET /quarantine and POST /quarantine/evict?boot_id=...&force=....

    The node's loop, which `post` reaches, carries both out; 503 if it is too busy. token: 401 without it.
    """
    router = APIRouter(prefix="/quarantine", dependencies=[] if token is None else [Depends(_bearer_of(token))])

    @router.get("")
    def listing() -> QuarantineList:
        return on_loop(post, quarantine.list, timeout)

    @router.post("/evict")
    def evict(boot_id: str, force: bool = False) -> Eviction:
        return on_loop(post, lambda: quarantine.evict(boot_id, force), timeout)

    return router


def _bearer_of(token: str) -> Callable[..., None]:
    """A dependency that refuses requests without the token."""

    def check(shown: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]) -> None:
        if shown is None or not secrets.compare_digest(shown.credentials.encode(), token.encode()):
            raise HTTPException(
                401,
                "expected the header 'Authorization: Bearer TOKEN' with the operator.token of this node's --key-dir; "
                "`hisparse-pd quarantine --key-dir DIR` sends it",
                {"WWW-Authenticate": "Bearer"},
            )

    return check
