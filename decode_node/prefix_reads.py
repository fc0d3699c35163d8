"""Lets prefill nodes read prefixes out of this node's pool.

A lease is an owner of its slots. An abort of the request, or an eviction, does not free them while the lease lasts. It
ends when the reader sends `FetchDone` or another message by which nothing of the attempt is in flight, when the reader
is proved dead, or when an operator evicts the reader. Then the slots are free at once: a late read changes no memory
here, and its reader compares the bytes with digests.

Each rank of a prefill node is a reader. The node speaks for all of them. The death of a process counts for that process
alone.
"""

import time
from collections.abc import Callable

import structlog

from control.messages import FetchGrant, FetchRefused, FetchRequest, Peer
from control.plane import ControlPlane
from decode_node.attempt import AttemptTable, PrefillAttempt, ReadLease
from decode_node.prefill_nodes import PrefillNodes
from decode_node.verifier import ChecksumTask, Digesting
from kvcache.extents import NO_SLOTS, HostSlots
from kvcache.host_pool import HostKVPool

log = structlog.get_logger(__name__)


class PrefixReads:
    """Grants leases, at most one for each attempt, and ends them. One loop calls it.

    submit: has the verifier compute digests, whose result comes to `digested`; False if it is too busy.
    """

    def __init__(
        self,
        control: ControlPlane,
        attempts: AttemptTable,
        nodes: PrefillNodes,
        host: HostKVPool,
        submit: Callable[[ChecksumTask], bool],
    ) -> None:
        self._control = control
        self._attempts = attempts
        self._nodes = nodes
        self._host = host
        self._submit = submit

    def on_request(self, sender: Peer, message: FetchRequest) -> None:
        """Grant a lease, or refuse with the reason."""
        attempt = self._attempts.get(message.attempt)
        lease = None if attempt is None else attempt.lease
        if attempt is not None and lease is not None and (lease.start, lease.stop) == (message.start, message.stop):
            if lease.grant is not None and attempt.is_live:
                self._control.send(sender, lease.grant)
            return
        if attempt is None or not attempt.needs_node:
            self._refuse(sender, message, "the attempt is over")
        elif attempt.was_leased:
            self._refuse(sender, message, "an attempt reads once")
        elif message.stop > len(attempt.prefix):
            self._refuse(sender, message, f"only {len(attempt.prefix)} positions are here, not {message.stop}")
        else:
            self._lease(sender, message, attempt)

    def digested(self, result: Digesting) -> None:
        """Take digests from the verifier. They change nothing if the lease or the attempt has ended meanwhile."""
        attempt, lease = result.attempt, result.attempt.lease
        if lease is None or not attempt.is_live:
            return
        if result.error is not None:
            self._end(attempt)
            refused = FetchRefused(attempt=attempt.id, reason=f"digests could not be computed: {result.error}")
            self._control.send(attempt.node, refused)
            return
        extents = HostSlots(lease.slots.cut(lease.start)[1]).extents
        lease.grant = FetchGrant(
            attempt=attempt.id,
            start=lease.start,
            stop=lease.stop,
            extents=tuple((extent.start, extent.length) for extent in extents),
            checksums=result.digests,
        )
        self._control.send(attempt.node, lease.grant)

    def returned(self, attempt: PrefillAttempt, sender: Peer) -> None:
        """The sender and its ranks read nothing of the attempt any more. It counts if that is the attempt's node."""
        if attempt.lease is not None and attempt.node.boot_id == sender.boot_id:
            self._end(attempt)

    def release_dead_readers(self) -> None:
        for attempt, lease in self._attempts.leases:
            for reader in list(lease.readers):
                if self._nodes.is_dead(reader, lease.leased_at):
                    log.info("a reader is dead", reader=reader.address, **attempt.id.log_fields)
                    self._gone(attempt, lease, reader)

    @property
    def orphaned(self) -> list[tuple[PrefillAttempt, ReadLease]]:
        """Leases of attempts that have ended."""
        return [(attempt, lease) for attempt, lease in self._attempts.leases if not attempt.is_live]

    def evict(self, boot_id: str) -> None:
        """End this process's leases of attempts that have ended: an operator says that it is gone."""
        for attempt, lease in self.orphaned:
            for reader in lease.readers_of(boot_id):
                self._gone(attempt, lease, reader)

    def _gone(self, attempt: PrefillAttempt, lease: ReadLease, reader: Peer) -> None:
        lease.readers.remove(reader)
        if not lease.readers:
            self._end(attempt)

    def _end(self, attempt: PrefillAttempt) -> None:
        assert attempt.lease is not None
        self._host.release(attempt.lease.slots)
        attempt.lease = None
        self._attempts.drop_if_over(attempt)

    def _lease(self, sender: Peer, message: FetchRequest, attempt: PrefillAttempt) -> None:
        slots, prefixes, request = NO_SLOTS, self._host.prefixes, attempt.request
        if prefixes is not None:
            # As far as they are cached in whole blocks, with one owner more.
            slots = prefixes.hold(request.kv_token_ids[: message.stop], request.generate.cache_salt)
        if len(slots) != message.stop:
            self._host.release(slots)
            self._refuse(sender, message, f"only {len(slots)} positions are in whole blocks, not {message.stop}")
            return
        if not self._submit(Digesting(attempt, message.start, slots.slots()[message.start :])):
            # The verifier is busy; the node asks again.
            self._host.release(slots)
            return
        attempt.was_leased = True
        readers = [attempt.node, *attempt.ranks]
        attempt.lease = ReadLease(readers, slots, message.start, message.stop, leased_at=time.monotonic())

    def _refuse(self, sender: Peer, message: FetchRequest, reason: str) -> None:
        log.info("fetch refused", reason=reason, node=sender.address, **message.attempt.log_fields)
        self._control.send(sender, FetchRefused(attempt=message.attempt, reason=reason))
