"""The prefill node on the control plane: takes requests from decode nodes and reports on them.

The protocol is in docs/protocol.md. The endpoint sends and repeats messages; the planner has them computed and written.
"""

import time
from collections.abc import Hashable, Iterable

import structlog

from base.device import DeviceFailed
from base.phase import Phase
from base.tombstones import REMEMBERED, LatestDict
from control import messages
from control.messages import AttemptId, FetchGrant, FetchRefused, Message, Peer, PrefillFailed, PrefillRequest, Quiesced
from prefill_node.attempt import HeldAttempt, Update
from prefill_node.lanes import DecodeNodes
from prefill_node.planner import PrefillPlanner
from ranks.barrier import GroupFailed
from ranks.group import Ranks
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
    """Speaks to decode nodes of the attempts that the planner holds, and of those that are finished."""

    def __init__(self, shell: NodeShell[tuple[Peer, Message]], planner: PrefillPlanner, ranks: Ranks) -> None:
        """ranks: the processes that this node is. This one is the endpoint of all."""
        self._shell = shell
        self._ranks = ranks
        self._control = shell.control
        self._planner = planner
        self._held = planner.held
        self._finished: LatestDict[AttemptId, bool] = LatestDict(REMEMBERED)
        """Attempts of which nothing is in flight, so that a delayed duplicate gets the same answer, and whether their
        writes may linger in the network. Every answer repeats that, since each may be lost."""
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
            self._ranks.report(str(failure))
            self._give_up(failure, _LAST_WORDS_S)
            raise
        except DeviceFailed as failure:
            self._give_up(failure, _END_S)
            raise

    def _serve(self) -> None:
        lifecycle = self._shell.lifecycle
        while lifecycle.phase is Phase.SERVING:
            self._turn()
        self._shell.leave()
        farewell_until = time.monotonic() + _FAREWELL_S
        if lifecycle.phase is Phase.DRAINING:
            not_begun = [attempt for attempt in self._held.values() if not attempt.has_begun]
            self._hand_back(not_begun, "the prefill node is draining")
        while lifecycle.phase is Phase.DRAINING and (self._held or time.monotonic() < farewell_until):
            self._turn()
        self._hand_back(self._held.values(), "the prefill node is stopping")
        self._turn_until(time.monotonic() + _END_S)
        while time.monotonic() < farewell_until:
            self._turn()

    def _give_up(self, failure: Exception, seconds: float) -> None:
        self._shell.lifecycle.end()
        self._shell.leave()
        self._hand_back(self._held.values(), str(failure))
        self._turn_until(time.monotonic() + seconds)

    def _turn_until(self, deadline: float) -> None:
        """Go on until nothing is held, or until that time."""
        while self._held and time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        for item in self._shell.receive(_IDLE_WAIT_S):
            self._take(*item)
        lifecycle = self._shell.lifecycle
        lifecycle.follow(self._ranks.sync_phase(lifecycle.phase))
        self._housekeep(time.monotonic())
        self._send_updates()

    # --- messages of decode nodes ---

    def _take(self, sender: Peer, message: Message) -> None:
        match message:
            case messages.AttemptMessage(sent_by=messages.DECODE) if message.attempt.decode != sender.boot_id:
                log.warning("not its own attempt", sender=sender.address, **message.attempt.log_fields)
            case PrefillRequest():
                self._on_request(sender, message)
            case messages.ChunkTaken():
                self._answered(message.attempt, ("chunk", message.number))
            case messages.Admitted():
                self._answered(message.attempt, "done")
                attempt = self._held.get(message.attempt)
                if attempt is not None and self._planner.release(attempt):
                    self._finish(attempt)
            case messages.Abort():
                self._on_abort(sender, message.attempt)
            case FetchGrant() | FetchRefused():
                self._answered(message.attempt, "fetch")
                self._planner.fetch_answered(message)
            case messages.Holding():
                self._on_holding(sender, message)
            case messages.Registered() | messages.Refused() | messages.HeartbeatAck():
                pass
            case _:
                log.warning("not for a prefill node", kind=type(message).__name__, sender=sender.address)

    def _on_request(self, decode: Peer, request: PrefillRequest) -> None:
        attempt = request.attempt
        if attempt in self._finished:
            self._control.send(decode, self._quiesced(attempt))
            return
        self._control.send(decode, messages.PrefillAccepted(attempt=attempt))
        if attempt in self._held:
            return
        if not self._shell.lifecycle.serving:
            self._refuse(decode, attempt, "the prefill node is draining")
        elif reason := self._planner.rejection_reason(decode, request):
            self._refuse(decode, attempt, reason)
        else:
            self._planner.start(decode, request)
            self._decode_nodes.watch([decode])
            log.debug("queued", tokens=len(request.token_ids), **attempt.log_fields)

    def _refuse(self, decode: Peer, attempt: AttemptId, reason: str) -> None:
        log.warning("refused", reason=reason, **attempt.log_fields)
        leaving = not self._shell.lifecycle.serving
        self._control.send(decode, PrefillFailed(attempt=attempt, reason=reason, leaving=leaving, refused=True))
        self._remember(attempt)

    def _on_abort(self, sender: Peer, attempt: AttemptId) -> None:
        if (held := self._held.get(attempt)) is not None:
            self._answered(attempt, "failed")
            self._planner.stop(held)
        else:
            self._remember(attempt)
            self._control.send(sender, self._quiesced(attempt))

    def _on_holding(self, sender: Peer, message: messages.Holding) -> None:
        """Report the progress of the sender's attempts, and which of them are not here."""
        own = tuple(attempt for attempt in message.attempts if attempt.decode == sender.boot_id)
        self._control.send(sender, self._planner.progress(own))
        gone = [attempt for attempt in own if attempt not in self._held]
        for attempt in gone:
            if self._finished.get(attempt):
                self._control.send(sender, self._quiesced(attempt))
        if quiet := tuple(attempt for attempt in gone if not self._finished.get(attempt)):
            self._control.send(sender, messages.NotHeld(attempts=quiet))

    # --- updates of the planner ---

    def _send_updates(self) -> None:
        for update in self._planner.poll():
            self._send_update(self._held[update.attempt], update)

    def _send_update(self, attempt: HeldAttempt, update: Update) -> None:
        if isinstance(update, PrefillFailed):
            update = update.model_copy(update={"leaving": not self._shell.lifecycle.serving})
        match update:
            case messages.FetchRequest():
                self._repeat(attempt, "fetch", update)
            case messages.ChunkDone():
                self._repeat(attempt, ("chunk", update.number), update)
            case messages.PrefillDone():
                self._repeat(attempt, "done", update)
            case PrefillFailed(in_flight=True):
                self._repeat(attempt, "failed", update)
            case messages.FetchDone():
                self._answered(attempt.id, "fetch")
                self._control.send(attempt.decode, update)
            case PrefillFailed() | Quiesced():
                log.info(
                    "stopped", reason=attempt.failure or "aborted", lingering=attempt.lingering, **attempt.id.log_fields
                )
                self._finish(attempt)
                self._control.send(attempt.decode, update)

    def _repeat(self, attempt: HeldAttempt, what: Hashable, message: Message) -> None:
        attempt.repeated.add(what)
        self._control.repeat((what, attempt.id), attempt.decode, message)

    def _answered(self, attempt: AttemptId, what: Hashable) -> None:
        if (held := self._held.get(attempt)) is not None:
            held.repeated.discard(what)
            self._control.answered((what, attempt))

    def _finish(self, attempt: HeldAttempt) -> None:
        """An attempt has ended: stop repeating its messages."""
        for what in attempt.repeated:
            self._control.answered((what, attempt.id))
        self._planner.forget(attempt)
        self._remember(attempt.id, attempt.lingering)

    def _remember(self, attempt: AttemptId, lingering: bool = False) -> None:
        self._finished[attempt] = lingering or self._finished.get(attempt, False)

    def _quiesced(self, attempt: AttemptId) -> Quiesced:
        """The answer to a message that would stop a finished attempt, or start it again."""
        return Quiesced(attempt=attempt, lingering=self._finished.get(attempt, False))

    # --- housekeeping ---

    def _hand_back(self, attempts: Iterable[HeldAttempt], reason: str) -> None:
        """Fail these attempts, so that their decode nodes ask another prefill node at once."""
        for attempt in list(attempts):
            self._planner.stop(attempt, reason)
        self._send_updates()

    def _housekeep(self, now: float) -> None:
        """Once a second, give up attempts whose decode node is silent, and close connections without attempts."""
        if now < self._housekeeping_at:
            return
        self._housekeeping_at = now + 1.0
        for attempt in list(self._held.values()):
            silent = self._decode_nodes.is_silent(attempt.decode, now)
            if silent and self._planner.stop(attempt, "the decode node is silent"):
                log.warning("decode node is silent", decode=attempt.decode.address, **attempt.id.log_fields)
        serving = {attempt.decode for attempt in self._held.values()}
        self._decode_nodes.watch(serving)
        self._planner.keep_connected(serving)
