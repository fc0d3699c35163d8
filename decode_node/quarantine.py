"""Lets an operator list the quarantine and evict what a dead prefill node has left in it.

If a prefill node is gone for good and no process takes its address, its slots would stay in quarantine for ever, since
silence proves nothing. An operator who knows that it is gone can evict them.
"""

import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Depends, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel

from control.messages import AttemptId, Peer
from control.plane import ControlPlane
from decode_node.health import SILENCE_S
from decode_node.lent_prefixes import LentPrefixes, Loan
from decode_node.loop_call import LoopBusy, LoopCall, Result, on_loop
from transfer.fencing import Reservation, ReservationTable, Writer

log = structlog.get_logger(__name__)

DANGER = "evicting a process that still writes corrupts the memory of other requests"


class QuarantinedReservation(BaseModel):
    """Slots of an abandoned attempt, and a process that may still be at them: a prefill node, or one of its ranks.

    Slots that several processes may be writing to are listed for each of them.
    """

    request_id: str
    epoch: int
    slots: int
    quarantined_s: float
    """Seconds in quarantine."""
    writer: str
    """The process's control address."""
    boot_id: str
    access: Literal["writes", "reads"] = "writes"
    """reads: slots of a cached prefix, which nobody may give away while that process reads them."""
    last_heard_s: float | None
    """Seconds since that process was last heard; None if that is too long ago to be known."""
    free_in_s: float | None
    """Seconds until the slots are free of this process, if it is proved dead or evicted; None otherwise."""


class QuarantineList(BaseModel):
    reservations: list[QuarantinedReservation]


class Eviction(BaseModel):
    """What an eviction frees, after the grace for writes that the network still carries; what was read, at once.

    also_written_by, also_read_by: boot ids of other ranks that may still be writing to some of it, or reading it, which
    is not free before.
    """

    boot_id: str
    reservations: int
    slots: int
    free_in_s: float
    also_written_by: list[str] = []
    also_read_by: list[str] = []
    warning: str = DANGER


class Quarantine:
    """Lists and evicts quarantined reservations. The node's loop, which owns them, calls it."""

    def __init__(
        self, reservations: ReservationTable[AttemptId, Peer, Any], control: ControlPlane, lent: LentPrefixes
    ) -> None:
        """lent: what prefill nodes read."""
        self._reservations = reservations
        self._control = control
        self._lent = lent

    def list(self) -> QuarantineList:
        """All quarantined reservations with the processes that they wait for, oldest first.

        So, too, prefixes that were lent for attempts that are over, and that are not known to be read no more.
        """
        now = time.monotonic()
        found = [self._written(r, writer, now) for r in self._reservations.quarantined for writer in r.writers]
        found += [
            self._read(loan, reader, since, now) for loan, since in self._lent.orphaned for reader in loan.readers
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
        loans = [loan for loan, _ in self._lent.orphaned if loan.readers_of(boot_id)]
        readers = [reader for loan in loans for reader in loan.readers_of(boot_id)]
        if not mine and not loans:
            raise HTTPException(404, f"nothing is in quarantine for boot id {boot_id}")
        peer = writers[0].peer if writers else readers[0]
        heard = self._control.last_heard(boot_id)
        if heard is not None and now - heard < SILENCE_S and not force:
            raise HTTPException(
                409,
                f"{peer.address} (boot id {boot_id}) was heard {now - heard:.1f} s ago, and {DANGER}; "
                "stop it first, or force the eviction",
            )
        self._reservations.evict(boot_id, now)
        self._lent.evict(boot_id)
        eviction = Eviction(
            boot_id=boot_id,
            reservations=len(mine) + len(loans),
            slots=sum(reservation.num_slots for reservation in mine) + sum(loan.num_slots for loan in loans),
            free_in_s=max(0.0, max((writer.free_after or now for writer in writers), default=now) - now),
            also_written_by=sorted({writer.peer.boot_id for r in mine for writer in r.writers if writer.may_post}),
            also_read_by=sorted({reader.boot_id for loan in loans for reader in loan.readers}),
        )
        log.warning("evicted by an operator", forced=force, **eviction.model_dump(exclude={"warning"}))
        return eviction

    def _written(
        self, reservation: Reservation[AttemptId, Peer, Any], writer: Writer[Peer], now: float
    ) -> QuarantinedReservation:
        free_after = writer.free_after
        return QuarantinedReservation(
            request_id=reservation.key.request_id,
            epoch=reservation.key.epoch,
            slots=reservation.num_slots,
            quarantined_s=now - (reservation.quarantined_at or now),
            writer=writer.peer.address,
            boot_id=writer.peer.boot_id,
            last_heard_s=self._last_heard_s(writer.peer, now),
            free_in_s=None if free_after is None else max(0.0, free_after - now),
        )

    def _read(self, loan: Loan, reader: Peer, since: float, now: float) -> QuarantinedReservation:
        return QuarantinedReservation(
            request_id=loan.attempt.request_id,
            epoch=loan.attempt.epoch,
            slots=loan.num_slots,
            quarantined_s=now - since,
            writer=reader.address,
            boot_id=reader.boot_id,
            access="reads",
            last_heard_s=self._last_heard_s(reader, now),
            free_in_s=None,
        )

    def _last_heard_s(self, peer: Peer, now: float) -> float | None:
        heard = self._control.last_heard(peer.boot_id)
        return None if heard is None else now - heard


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

    def call(action: Callable[[], Result]) -> Result:
        try:
            return on_loop(post, action, timeout)
        except LoopBusy as error:
            raise HTTPException(503, f"{error}; nothing was evicted") from error

    @router.get("")
    def listing() -> QuarantineList:
        return call(quarantine.list)

    @router.post("/evict")
    def evict(boot_id: str, force: bool = False) -> Eviction:
        return call(lambda: quarantine.evict(boot_id, force))

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
