"""Prefills prompts by other nodes.

The reservation table owns the slots of an attempt from before the prefill node learns of them until they have landed
or no process can write to them any more. An attempt lands when the prefill node has confirmed its last write and all
checksums match. Chunks are verified while later chunks are computed.
"""

import time
from collections.abc import Callable

import structlog

from base.metrics import Metrics
from control.messages import (
    MAX_ATTEMPTS,
    Admitted,
    AttemptId,
    ChunkDone,
    ChunkTaken,
    Destination,
    FetchDone,
    FetchRequest,
    Holding,
    NotHeld,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    Progress,
    Quiesced,
)
from control.plane import ControlPlane
from decode_node import spans
from decode_node.attempt import AttemptState, AttemptTable, PrefillAttempt, chunk_of
from decode_node.prefill_nodes import PrefillNodes
from decode_node.prefix_reads import PrefixReads
from decode_node.quarantine import Quarantine
from decode_node.request import Request, RequestState
from decode_node.verifier import ChecksumTask, Verification
from kvcache.extents import NO_SLOTS, HostSlots
from kvcache.host_pool import HostKVPool
from transfer.fencing import Fence, ReservationTable

log = structlog.get_logger(__name__)

_INQUIRE_S = 0.5
"""How often prefill nodes are checked and asked for their progress."""

PrefillMessage = (
    PrefillAccepted | ChunkDone | PrefillDone | PrefillFailed | Quiesced | NotHeld | Progress | FetchRequest | FetchDone
)


class RemotePrefill:
    """Owns the attempts of PREFILLING requests. One loop calls it.

    `verify` queues checksums for the verifier, whose result comes to `verified`; False if the verifier is too busy.
    `on_landed` is called when the KV of a request is complete and verified, with how many of its tokens
    the prefill node had. `on_lost` is told the reason when a request has lost its attempt.
    `patience`: seconds without acceptance or progress after which an attempt is given up.
    `host` owns the slots; `cut` makes a fence (`transfer.fencing`).
    """

    def __init__(
        self,
        control: ControlPlane,
        destination: Destination,
        host: HostKVPool,
        cut: Callable[[], Fence],
        verify: Callable[[ChecksumTask], bool],
        metrics: Metrics,
        patience: float,
        on_lost: Callable[[Request, str], None],
        on_landed: Callable[[Request, int], None] = lambda *_: None,
    ) -> None:
        self._attempts = AttemptTable()
        self._host = host
        self.nodes = PrefillNodes(control, patience)
        self.reads = PrefixReads(control, self._attempts, self.nodes, host, verify)
        self._reservations: ReservationTable[AttemptId, Peer, HostSlots] = ReservationTable(
            host.release, host.retain, cut
        )
        self.quarantine = Quarantine(control, self._reservations, self.nodes, self.reads)
        self._control = control
        self._me = control.me.boot_id
        self._destination = destination
        self._verify = verify
        self._metrics = metrics
        self._on_lost = on_lost
        self._on_landed = on_landed
        self._inquire_at = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._attempts and not len(self._reservations)

    @property
    def lingering_slots(self) -> int:
        """Slots of requests that have landed and given them up, which are free when a fence has passed."""
        return sum(map(self._host.num_owned_once, self._reservations.lingering))

    # --- attempts begin and end ---

    def dispatch(self, request: Request, node: Peer, slots: HostSlots) -> None:
        """Reserve the slots under a new epoch and ask the node to fill them with the KV of all tokens but the last.

        Slots that the request has already hold the positions before them.
        """
        request.epoch += 1
        request.move(RequestState.PREFILLING)
        ranks = self.nodes.ranks_of(node, request)
        attempt = PrefillAttempt(
            request.attempt(self._me),
            request,
            node,
            slots,
            time.monotonic(),
            request.kv_tokens,
            request.host_slots or NO_SLOTS,
            request.logprobs_to_compute(),
            ranks,
            request.stage,
        )
        attempt.span.note(lambda: spans.asked(attempt))
        self._reservations.open(attempt.id, node, slots, len(slots), ranks)
        self._attempts[attempt.id] = attempt
        self.nodes.begun(node, request.request_id)
        self._control.repeat(("prefill", attempt.id), node, attempt.message(self._destination))
        log.debug(
            "prefill dispatched",
            node=node.address,
            tokens=attempt.num_tokens,
            cached=len(attempt.prefix),
            extents=len(slots.extents),
            **attempt.id.log_fields,
        )

    def abandon(self, request: Request) -> None:
        """The request no longer wants its prefill: its slots stay in quarantine until nothing can write to them."""
        attempt = self._attempts[request.attempt(self._me)]
        self._end(attempt, AttemptState.LOST)
        self.quarantine.add(attempt.id)

    def _end(self, attempt: PrefillAttempt, state: AttemptState) -> None:
        attempt.move(state, time.monotonic())
        self._attempts.drop_if_over(attempt)
        self.nodes.ended(attempt)
        self._control.answered(("prefill", attempt.id))

    def _land(self, attempt: PrefillAttempt, done: PrefillDone) -> None:
        """The request gets the slots. If a write may linger, their next owner gets them only after a fence."""
        request = attempt.request
        self._end(attempt, AttemptState.LANDED)
        landed = self._reservations.landed(attempt.id, time.monotonic(), done.lingering)
        request.host_slots = attempt.prefix.extend(landed.extents)
        request.may_be_shared = not done.lingering
        request.prefilled_by = attempt.node.address
        if attempt.prompt_logprobs is not None:
            request.prompt_logprobs = attempt.prompt_logprobs
        attempt.span.note(lambda: spans.landed(done))
        request.failed_nodes.clear()
        request.prefill_failures = 0
        request.move(RequestState.LANDED)
        self._control.send(attempt.node, Admitted(attempt=attempt.id))
        say = log.info if done.lingering else log.debug
        say(
            "landed",
            node=attempt.node.address,
            bytes=done.transferred_bytes,
            descriptors=done.descriptors,
            transfer_seconds=round(done.transfer_seconds, 4),
            checksums=attempt.num_checksums,
            lingering=done.lingering,
            **attempt.id.log_fields,
        )
        self._on_landed(request, done.cached_tokens)

    def _lose(self, attempt: PrefillAttempt | None, reason: str, leaving: bool = False) -> None:
        """The node stopped working on an attempt. That fails a live one unless the node had announced everything.

        leaving: the node shuts down and hands its requests back, which counts as no failure.
        """
        if attempt is None or not attempt.needs_node:
            return
        if not leaving:
            self._fail(attempt, reason)
            return
        log.info("prefill handed back", node=attempt.node.address, reason=reason, **attempt.id.log_fields)
        self._give_back(attempt, reason)

    def _fail(self, attempt: PrefillAttempt, reason: str, kind: str = "prefill") -> None:
        """End an attempt that is still wanted. kind: the metrics' word for the reason."""
        attempt.request.prefill_failures += 1
        attempt.request.failed_nodes.add(attempt.node.boot_id)
        self._metrics.transfer_failures.labels(kind).inc()
        log.warning("prefill attempt failed", reason=reason, **attempt.id.log_fields)
        self._give_back(attempt, reason)

    def _give_back(self, attempt: PrefillAttempt, reason: str) -> None:
        attempt.span.fail(reason)
        self.abandon(attempt.request)
        attempt.request.move(RequestState.WAITING)
        self._on_lost(attempt.request, reason)

    # --- messages of prefill nodes ---

    def take(self, sender: Peer, message: PrefillMessage) -> None:
        """Act on a prefill node's message. Only the node that was asked for an attempt may speak of it."""
        if isinstance(message, Progress):
            self._on_progress(sender, message)
            return
        for attempt_id in message.attempts if isinstance(message, NotHeld) else (message.attempt,):
            attempt = self._attempts.get(attempt_id)
            if attempt is None or not attempt.is_live or attempt.node.boot_id == sender.boot_id:
                self._on(sender, attempt_id, message)
            else:
                log.warning("from a node that was not asked", node=sender.address, **attempt_id.log_fields)

    def _on(self, sender: Peer, attempt_id: AttemptId, message: PrefillMessage) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and _says_that_nothing_is_in_flight(message):
            self.reads.returned(attempt, sender)
        if attempt is not None and not attempt.is_live:
            attempt = None
        match message:
            case PrefillAccepted():
                self._control.answered(("prefill", attempt_id))
                if attempt is not None:
                    attempt.accept(time.monotonic())
            case ChunkDone() | PrefillDone():
                self._on_arrival(sender, attempt, message)
            case FetchRequest():
                self.reads.on_request(sender, message)
            case PrefillFailed():
                if message.leaving:
                    self.nodes.retire(sender.boot_id)
                elif attempt is not None and not message.refused:
                    self.nodes.failed(sender, attempt_id.request_id)
                self._lose(attempt, message.reason, message.leaving)
                self.quarantine.on_failed(sender, message)
            case Quiesced():
                self._lose(attempt, "the prefill node gave it up")
                self.quarantine.on_quiesced(sender, attempt_id, message.lingering)
            case NotHeld():
                self._lose(attempt, "the prefill node does not know it")
                self.quarantine.on_quiesced(sender, attempt_id)

    def _on_progress(self, sender: Peer, message: Progress) -> None:
        self.nodes.note_pass(sender, message.current_pass)
        for attempt_id, computed in message.computed:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None and attempt.node.boot_id == sender.boot_id:
                attempt.note_progress(computed, message.current_pass, time.monotonic())

    # --- arrival and verification ---

    def _on_arrival(self, sender: Peer, attempt: PrefillAttempt | None, message: ChunkDone | PrefillDone) -> None:
        """A chunk has landed, or the whole prompt has. attempt: None if it has landed or was given up."""
        if attempt is not None:
            if reason := attempt.rejection_reason(message):
                self._fail(attempt, reason)
                return
            if (chunk := chunk_of(message)) not in attempt.taken:
                if message.checksums and not self._verify(Verification(attempt, chunk, message.checksums)):
                    # The verifier is busy: the node repeats its message.
                    return
                attempt.accept(time.monotonic())
                attempt.take(message, time.monotonic())
        elif isinstance(message, PrefillDone):
            # That the last write landed is as good as Quiesced.
            self.quarantine.on_quiesced(sender, message.attempt, message.lingering)
            self._control.send(sender, Admitted(attempt=message.attempt))
        if isinstance(message, ChunkDone):
            self._control.send(sender, ChunkTaken(attempt=message.attempt, number=message.number))
        if attempt is not None:
            self._land_if_verified(attempt)

    def verified(self, result: Verification) -> None:
        """Take the result of a verification. It changes nothing if the attempt was given up meanwhile."""
        attempt = result.attempt
        if not attempt.is_live:
            return
        if result.failure_reason is None:
            attempt.verified(result.chunk)
            self._land_if_verified(attempt)
            return
        if result.mismatches:
            log.error(
                "transferred KV is not what was sent",
                node=attempt.node.address,
                mismatches=len(result.mismatches),
                checksums=len(result.checksums),
                first=result.examples(),
                **attempt.id.log_fields,
            )
            self.nodes.failed(attempt.node, attempt.id.request_id)
        self._fail(attempt, result.failure_reason, "checksum" if result.mismatches else "verification")

    def _land_if_verified(self, attempt: PrefillAttempt) -> None:
        if attempt.done is None or not attempt.is_verified:
            return
        if attempt.prompt_logprobs is None or attempt.prompt_logprobs.complete:
            self._land(attempt, attempt.done)
        else:
            self._fail(attempt, "log probabilities of the prompt are missing")

    # --- housekeeping ---

    def tick(self, now: float) -> None:
        """Release slots that have become safe, give up attempts whose node is unhealthy, and ask nodes for progress."""
        self.quarantine.release_expired(now)
        if now < self._inquire_at:
            return
        self._inquire_at = now + _INQUIRE_S
        writers = {writer.peer for reservation in self._reservations for writer in reservation.writers}
        readers = {reader for _, lease in self._attempts.leases for reader in lease.readers}
        self._control.watch(self.nodes.known | writers | readers)
        for attempt in list(self._attempts.values()):
            if attempt.needs_node and (reason := self.nodes.failure_reason(attempt, now)):
                self._lose(attempt, reason)
        self.quarantine.look_for_dead_writers(now)
        self.reads.release_dead_readers()
        self._ask_for_progress()

    def _ask_for_progress(self) -> None:
        asked: dict[Peer, list[AttemptId]] = {node: [] for node in self.nodes.stuck & self.nodes.known}
        for attempt in self._attempts.values():
            if attempt.state is AttemptState.ACCEPTED:
                asked.setdefault(attempt.node, []).append(attempt.id)
        for node, attempts in asked.items():
            self._control.send(node, Holding(attempts=tuple(attempts[:MAX_ATTEMPTS])))


def _says_that_nothing_is_in_flight(message: PrefillMessage) -> bool:
    """Whether its sender neither writes nor reads anything of the attempt any more."""
    if isinstance(message, PrefillFailed):
        return not message.in_flight
    return isinstance(message, FetchDone | PrefillDone | Quiesced | NotHeld)
