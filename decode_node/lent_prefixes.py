"""Lets prefill nodes read prefixes out of this node's pool, and keeps their slots until nobody reads them any more.

What is lent has an owner more: an abort of the request, or an eviction, does not free it while a reader may be at it.
It comes back when the reader says so, with `FetchDone` or whatever says that nothing of its attempt is in flight, or
is proved dead, or an operator vouches that it is gone. Then it is free at once: a read that comes too late spoils no
memory here, and its reader compares what it got with digests.

A prefill node of several ranks is as many readers. What the node says it says for all of them; that a process is dead
or gone counts for that process alone.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from control.messages import AttemptId, FetchGrant, FetchRefused, FetchRequest, Peer
from control.plane import ControlPlane
from decode_node.attempt import PrefillAttempt
from decode_node.health import Health
from decode_node.request import Request
from decode_node.verifier import Digested, Digesting, Verification
from kvcache.extents import NO_SLOTS, HostSlots
from kvcache.host_pool import HostKVPool

log = structlog.get_logger(__name__)


@dataclass
class Loan:
    """Slots of positions [0, stop) of an attempt, of which `readers` may read those from `start` on.

    node: which asked. readers: the node and its ranks, without those that are known to be dead or gone. grant: what the
    node is told, once the digests are known. orphaned_at: when the attempt came to an end
    (time.monotonic); None while it goes on.
    """

    attempt: AttemptId
    node: Peer
    readers: list[Peer]
    slots: HostSlots
    start: int
    stop: int
    lent_at: float
    grant: FetchGrant | None = None
    orphaned_at: float | None = None

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    def readers_of(self, boot_id: str) -> list[Peer]:
        """The reader that is that process, if one is."""
        return [reader for reader in self.readers if reader.boot_id == boot_id]


class LentPrefixes:
    """The loans of a decode node, at most one for an attempt. One loop calls it.

    hold: makes the caller an owner of the slots of a request's first so many positions, as far as they are cached.
    take_back: ends that. submit: has the verifier compute digests, whose result comes to `digested`; False if it is
    too busy.
    """

    def __init__(
        self,
        control: ControlPlane,
        hold: Callable[[Request, int], HostSlots],
        take_back: Callable[[HostSlots], None],
        submit: Callable[[Verification | Digesting], bool],
        health: Health,
    ) -> None:
        self._control = control
        self._hold = hold
        self._take_back = take_back
        self._submit = submit
        self._health = health
        self._loans: dict[AttemptId, Loan] = {}

    def __len__(self) -> int:
        return len(self._loans)

    def __iter__(self) -> Iterator[Loan]:
        return iter(list(self._loans.values()))

    def on_request(self, sender: Peer, message: FetchRequest, attempt: PrefillAttempt | None) -> None:
        """Lend what was asked for. attempt: that of the message, if it is not over."""
        loan = self._loans.get(message.attempt)
        if loan is not None and (loan.start, loan.stop) == (message.start, message.stop):
            if loan.grant is not None and loan.orphaned_at is None:
                self._control.send(sender, loan.grant)
            return
        if attempt is None or not attempt.needs_node:
            self._refuse(sender, message, "the attempt is over")
        elif attempt.was_lent:
            self._refuse(sender, message, "an attempt reads once")
        elif message.stop > len(attempt.prefix):
            self._refuse(sender, message, f"only {len(attempt.prefix)} positions are here, not {message.stop}")
        else:
            self._lend(sender, message, attempt)

    def digested(self, result: Digested) -> None:
        """Take digests from the verifier. They change nothing if what was lent has come back meanwhile."""
        loan = self._loans.get(result.attempt_id)
        if loan is None or loan.orphaned_at is not None:
            return
        if result.error is not None:
            self.returned(loan.attempt, loan.node)
            refused = FetchRefused(attempt=loan.attempt, reason=f"digests could not be computed: {result.error}")
            self._control.send(loan.node, refused)
            return
        extents = HostSlots(loan.slots.cut(loan.start)[1]).extents
        loan.grant = FetchGrant(
            attempt=loan.attempt,
            start=loan.start,
            stop=loan.stop,
            extents=tuple((extent.start, extent.length) for extent in extents),
            checksums=result.checksums,
        )
        self._control.send(loan.node, loan.grant)

    def returned(self, attempt: AttemptId, sender: Peer) -> None:
        """The sender and its ranks read nothing of the attempt any more. It counts if that node has asked."""
        loan = self._loans.get(attempt)
        if loan is not None and loan.node.boot_id == sender.boot_id:
            self._end(loan)

    def attempt_ended(self, attempt: AttemptId, now: float) -> None:
        """The request does not need the attempt any more. Its reader may still read."""
        if (loan := self._loans.get(attempt)) is not None and loan.orphaned_at is None:
            loan.orphaned_at = now

    def take_from_dead_readers(self) -> None:
        """Take back what processes had that are proved dead."""
        for loan in self:
            for reader in list(loan.readers):
                if self._health.is_dead(reader, loan.lent_at):
                    log.info("a reader is dead", reader=reader.address, **loan.attempt.log_fields)
                    self._gone(loan, reader)

    @property
    def orphaned(self) -> list[tuple[Loan, float]]:
        """Loans of attempts that are over, and since when (time.monotonic)."""
        return [(loan, loan.orphaned_at) for loan in self if loan.orphaned_at is not None]

    def evict(self, boot_id: str) -> None:
        """An operator vouches that this process is gone: take back what it had of attempts that are over."""
        for loan, _ in self.orphaned:
            for reader in loan.readers_of(boot_id):
                self._gone(loan, reader)

    def _gone(self, loan: Loan, reader: Peer) -> None:
        loan.readers.remove(reader)
        if not loan.readers:
            self._end(loan)

    def _end(self, loan: Loan) -> None:
        del self._loans[loan.attempt]
        self._take_back(loan.slots)

    def _lend(self, sender: Peer, message: FetchRequest, attempt: PrefillAttempt) -> None:
        slots = self._hold(attempt.request, message.stop)
        if len(slots) != message.stop:
            self._take_back(slots)
            self._refuse(sender, message, f"only {len(slots)} positions are in whole blocks, not {message.stop}")
            return
        places = slots.slots()[message.start :]
        if not self._submit(Digesting(attempt.id, message.start, places)):
            # The verifier is busy; the node asks again.
            self._take_back(slots)
            return
        attempt.was_lent = True
        self._loans[attempt.id] = Loan(
            attempt.id,
            sender,
            [sender, *attempt.ranks],
            slots,
            message.start,
            message.stop,
            lent_at=time.monotonic(),
        )

    def _refuse(self, sender: Peer, message: FetchRequest, reason: str) -> None:
        log.info("fetch refused", reason=reason, node=sender.address, **message.attempt.log_fields)
        self._control.send(sender, FetchRefused(attempt=message.attempt, reason=reason))


def hold_cached_prefix(host: HostKVPool, request: Request, stop: int) -> HostSlots:
    """The slots of a request's first so many positions, as far as they are cached in whole blocks, with one owner
    more."""
    if host.prefixes is None:
        return NO_SLOTS
    return host.prefixes.hold(request.kv_token_ids[:stop], request.generate.cache_salt)
