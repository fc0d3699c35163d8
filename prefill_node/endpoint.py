"""The prefill node on the control plane: takes requests from decode nodes and reports on them.

The protocol is in docs/protocol.md. The endpoint sends and repeats messages; the engine computes and writes KV.
"""

import time

import structlog

from base.phase import Phase
from control.messages import (
    Abort,
    Admitted,
    AttemptId,
    ChunkDone,
    ChunkTaken,
    FetchDone,
    FetchGrant,
    FetchRefused,
    FetchRequest,
    HeartbeatAck,
    Holding,
    Message,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Quiesced,
    Refused,
    Registered,
)
from engine.device import DeviceFailed
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.engine import PrefillEngine, PrefillUpdate
from prefill_node.finished import FinishedAttempts
from ranks.barrier import GroupFailed
from ranks.group import RankGroup
from service.shell import NodeShell

log = structlog.get_logger(__name__)

_IDLE_WAIT_S = 0.2
_FAREWELL_S = 2.5
"""How long an idle node still refuses requests before it ends: decode nodes hear with their next heartbeat that it
leaves. A decode node that asks an ended process cannot know that nothing writes to the slots that it named."""
_END_S = 10.0
"""How long a stopping node waits for its writes to end: a receiver may hang."""
_LAST_WORDS_S = 0.5
"""How long a node whose group has failed goes on, so that decode nodes hear of it."""


class PrefillEndpoint:
    """Remembers who asked for which attempt, what is not acknowledged yet, and which attempts are finished."""

    def __init__(
        self, shell: NodeShell[tuple[Peer, Message]], engine: PrefillEngine, ranks: RankGroup | None = None
    ) -> None:
        """ranks: the group that this node is, if it has several processes. This one is the endpoint of all."""
        self._shell = shell
        self._ranks = ranks
        self._control = shell.control
        self._engine = engine
        self._asked_by: dict[AttemptId, Peer] = {}
        """The decode node of every attempt that the engine holds."""
        self._unacknowledged: dict[AttemptId, set[int]] = {}
        """Numbers of chunks whose ChunkDone was sent and not acknowledged yet."""
        self._finished = FinishedAttempts()
        self._decode_nodes = DecodeNodes(shell.control)
        self._housekeeping_at = 0.0

    def run(self) -> None:
        """Serve until told to stop; then finish what has begun, hand back the rest, and give up what is left.

        Raises DeviceFailed, after everything was handed back, if the device does not work any more, and GroupFailed if
        the other ranks do not: nobody knows of the writes of a rank that ended, so nothing is said to be quiet then.
        """
        try:
            self._serve()
        except GroupFailed as failure:
            if self._ranks is not None:
                self._ranks.report(str(failure))
            self._shell.lifecycle.end()
            self._shell.leave()
            self._hand_back(list(self._asked_by), str(failure))
            self._turn_until(time.monotonic() + _LAST_WORDS_S)
            raise
        except DeviceFailed as failure:
            self._shell.lifecycle.end()
            self._shell.leave()
            self._hand_back(list(self._asked_by), str(failure))
            self._turn_until(time.monotonic() + _END_S)
            raise

    def _serve(self) -> None:
        lifecycle = self._shell.lifecycle
        while lifecycle.phase is Phase.SERVING:
            self._turn()
        self._shell.leave()
        farewell_until = time.monotonic() + _FAREWELL_S
        if lifecycle.phase is Phase.DRAINING:
            not_begun = [attempt for attempt in self._asked_by if not self._engine.has_begun(attempt)]
            self._hand_back(not_begun, "the prefill node is draining")
        while lifecycle.phase is Phase.DRAINING and (self._asked_by or time.monotonic() < farewell_until):
            self._turn()
        self._hand_back(list(self._asked_by), "the prefill node is stopping")
        self._turn_until(time.monotonic() + _END_S)
        while time.monotonic() < farewell_until:
            self._turn()

    def _turn_until(self, deadline: float) -> None:
        """Go on until the engine holds nothing, or until that time."""
        while self._asked_by and time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        for item in self._shell.receive(_IDLE_WAIT_S):
            self._take(*item)
        if self._ranks is not None:
            lifecycle = self._shell.lifecycle
            lifecycle.follow(self._ranks.sync_phase(lifecycle.phase))
        self._housekeep(time.monotonic())
        self._send_updates()

    # --- messages of decode nodes ---

    def _take(self, sender: Peer, message: Message) -> None:
        match message:
            case PrefillRequest() | ChunkTaken() | Admitted() | Abort() | FetchGrant() | FetchRefused() if (
                message.attempt.decode != sender.boot_id
            ):
                log.warning("not its own attempt", sender=sender.address, **message.attempt.log_fields)
            case PrefillRequest():
                self._on_request(sender, message)
            case ChunkTaken():
                self._unacknowledged.get(message.attempt, set()).discard(message.number)
                self._control.answered(("chunk", message.attempt, message.number))
            case Admitted():
                self._control.answered(("done", message.attempt))
                if self._engine.release(message.attempt):
                    self._finish(message.attempt)
            case Abort():
                self._on_abort(sender, message.attempt)
            case FetchGrant() | FetchRefused():
                self._control.answered(("fetch", message.attempt))
                self._engine.fetch_answered(message)
            case Holding():
                self._on_holding(sender, message)
            case Registered() | Refused() | HeartbeatAck():
                pass
            case _:
                log.warning("not for a prefill node", kind=type(message).__name__, sender=sender.address)

    def _on_request(self, decode: Peer, request: PrefillRequest) -> None:
        attempt = request.attempt
        if attempt in self._finished:
            self._control.send(decode, self._finished.quiesced(attempt))
            return
        self._control.send(decode, PrefillAccepted(attempt=attempt))
        if attempt in self._asked_by:
            return
        if not self._shell.lifecycle.serving:
            self._refuse(decode, attempt, "the prefill node is draining")
        elif refusal := self._engine.refusal(decode, request):
            self._refuse(decode, attempt, refusal)
        else:
            self._asked_by[attempt] = decode
            self._decode_nodes.watch(self._asked_by.values())
            self._engine.start(decode, request)
            log.info("queued", tokens=len(request.token_ids), **attempt.log_fields)

    def _refuse(self, decode: Peer, attempt: AttemptId, reason: str) -> None:
        log.warning("refused", reason=reason, **attempt.log_fields)
        leaving = not self._shell.lifecycle.serving
        self._control.send(decode, PrefillFailed(attempt=attempt, reason=reason, leaving=leaving, refused=True))
        self._finished.add(attempt)

    def _on_abort(self, sender: Peer, attempt: AttemptId) -> None:
        if attempt in self._asked_by:
            self._control.answered(("failed", attempt))
            self._engine.stop(attempt)
        else:
            self._finished.add(attempt)
            self._control.send(sender, self._finished.quiesced(attempt))

    def _on_holding(self, sender: Peer, message: Holding) -> None:
        """Report the progress of the sender's attempts, and which of them are not here."""
        own = tuple(attempt for attempt in message.attempts if attempt.decode == sender.boot_id)
        self._control.send(sender, self._engine.progress(own))
        unknown = [attempt for attempt in own if attempt not in self._asked_by]
        for answer in self._finished.not_held(unknown):
            self._control.send(sender, answer)

    # --- updates of the engine ---

    def _send_updates(self) -> None:
        for update in self._engine.poll():
            self._send_update(update)

    def _send_update(self, update: PrefillUpdate) -> None:
        attempt = update.attempt
        decode = self._asked_by[attempt]
        match update:
            case FetchRequest():
                self._control.repeat(("fetch", attempt), decode, update)
            case FetchDone():
                self._control.answered(("fetch", attempt))
                self._control.send(decode, update)
            case ChunkDone():
                self._unacknowledged.setdefault(attempt, set()).add(update.number)
                self._control.repeat(("chunk", attempt, update.number), decode, update)
            case PrefillDone():
                if update.lingering:
                    self._finished.note_lingering(attempt)
                self._control.repeat(("done", attempt), decode, update)
            case PrefillFailed():
                failed = update.model_copy(update={"leaving": not self._shell.lifecycle.serving})
                if update.in_flight:
                    self._control.repeat(("failed", attempt), decode, failed)
                else:
                    self._stopped(attempt, update.reason, update.lingering)
                    self._control.send(decode, failed)
            case Quiesced():
                self._stopped(attempt, "aborted", update.lingering)
                self._control.send(decode, self._finished.quiesced(attempt))

    def _stopped(self, attempt: AttemptId, reason: str, lingering: bool) -> None:
        self._finish(attempt, lingering)
        log.info("stopped", reason=reason, lingering=lingering, **attempt.log_fields)

    def _finish(self, attempt: AttemptId, lingering: bool = False) -> None:
        """The engine no longer holds the attempt: repeat nothing of it any more."""
        del self._asked_by[attempt]
        self._control.answered(("done", attempt))
        self._control.answered(("failed", attempt))
        self._control.answered(("fetch", attempt))
        for number in self._unacknowledged.pop(attempt, ()):
            self._control.answered(("chunk", attempt, number))
        self._finished.add(attempt, lingering)

    # --- housekeeping ---

    def _hand_back(self, attempts: list[AttemptId], reason: str) -> None:
        """Fail these attempts, so that their decode nodes ask another prefill node at once."""
        for attempt in attempts:
            self._engine.stop(attempt, reason)
        self._send_updates()

    def _housekeep(self, now: float) -> None:
        """Once a second, give up attempts whose decode node is silent, and close connections without attempts."""
        if now < self._housekeeping_at:
            return
        self._housekeeping_at = now + 1.0
        for attempt, decode in self._asked_by.items():
            if self._decode_nodes.is_silent(decode, now) and self._engine.stop(attempt, "the decode node is silent"):
                log.warning("decode node is silent", decode=decode.address, **attempt.log_fields)
        self._decode_nodes.watch(self._asked_by.values())
        self._engine.keep_connected(set(self._asked_by.values()))
