"""Which prefill nodes do what they were asked to, and which are dead: judged by what is heard of them."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from control.messages import Peer
from control.plane import ControlPlane
from decode_node.attempt import AttemptState, PrefillAttempt

SILENCE_S = 2.5
"""After so many seconds without a sign of life a node that has work is taken for unwell, though not for dead."""
FAILURES = 3
"""A node that failed so many different requests in a row is passed over: it may fail at everything, and fast."""
TRIAL_AFTER_S = 10.0
"""So long after its last failure such a node gets one request, and whatever it is asked if that succeeds."""
_REMEMBERED = 4096

Fault = TypeVar("Fault")


@dataclass
class _Failures:
    """A node's failures in a row: of which requests, when the last was, and which request tries the node again."""

    requests: set[str] = field(default_factory=set)
    last_at: float = 0.0
    trial: str | None = None

    def may_be_asked(self, now: float) -> bool:
        if len(self.requests) < FAILURES:
            return True
        return self.trial is None and now - self.last_at >= TRIAL_AFTER_S


class Health:
    """What was found wrong with prefill nodes, until it shows that it is wrong no more. One loop calls it.

    `patience`: seconds that a node may take to accept a request, or to get on with those that it computes.
    """

    def __init__(self, control: ControlPlane, patience: float) -> None:
        self._control = control
        self._patience = patience
        self._silent: OrderedDict[Peer, float] = OrderedDict()
        """When each was found silent (time.monotonic)."""
        self._stuck: OrderedDict[Peer, int | None] = OrderedDict()
        """The forward pass that each was found stuck in; None if it has not told of one."""
        self._failing: OrderedDict[Peer, _Failures] = OrderedDict()

    @property
    def stuck(self) -> set[Peer]:
        """Nodes that answer pings and do not get on. Only their answer to Holding shows that this is over."""
        return set(self._stuck)

    def trouble(self, attempt: PrefillAttempt, now: float) -> str | None:
        """Why an attempt is not waited for any longer, or None. Its node is passed over for as long as that lasts."""
        node = attempt.node
        heard = max(self._control.last_heard(node.boot_id) or 0.0, attempt.dispatched_at)
        if self._replaced_after(node, attempt.dispatched_at):
            return f"prefill node {node.address} was restarted"
        if now - heard > SILENCE_S:
            self.suspect(node, now)
            return f"prefill node {node.address} is silent"
        if now - attempt.progressed_at <= self._patience:
            return None
        _remember(self._stuck, node, attempt.current_pass)
        missing = "not accepted it" if attempt.state is AttemptState.REQUESTED else "made no progress"
        return f"prefill node {node.address} has {missing} for {self._patience:g} s"

    def suspect(self, node: Peer, now: float) -> None:
        """The node was silent although it has work. It is passed over until it answers a ping that is sent later."""
        _remember(self._silent, node, now)

    def is_well(self, node: Peer) -> bool:
        """Whether nothing is wrong with a node, as far as is known."""
        since = self._silent.get(node)
        if since is not None and (self._control.alive_after(node.boot_id) or 0.0) > since:
            del self._silent[node]
        failing = self._failing.get(node)
        return (
            node not in self._silent
            and node not in self._stuck
            and (failing is None or failing.may_be_asked(time.monotonic()))
        )

    def begun(self, node: Peer, request_id: str) -> None:
        """A node was asked to prefill a request. If it is one that failed, this tries it."""
        failing = self._failing.get(node)
        if failing is not None and len(failing.requests) >= FAILURES:
            failing.trial = request_id

    def failed(self, node: Peer, request_id: str) -> None:
        """A node did not do what it was asked to, by its own word or by what arrived."""
        failing = self._failing.get(node) or _Failures()
        failing.requests.add(request_id)
        failing.last_at = time.monotonic()
        _remember(self._failing, node, failing)

    def ended(self, attempt: PrefillAttempt) -> None:
        """An attempt is over: its node may be tried by another request, or does its work again."""
        failing = self._failing.get(attempt.node)
        if attempt.state is AttemptState.LANDED:
            self._failing.pop(attempt.node, None)
        elif failing is not None and failing.trial == attempt.id.request_id:
            failing.trial = None

    def note_pass(self, node: Peer, current_pass: int | None) -> None:
        """A node says which forward pass is under way. If it is not the one that it hung in, it gets on again."""
        hung_in = self._stuck.get(node)
        if hung_in is None or hung_in != current_pass:
            self._stuck.pop(node, None)

    def is_dead(self, writer: Peer, asked_after: float) -> bool:
        """Whether it is proved that a process has ended which may write to slots that are not wanted any more.

        The proof is another process that answers at its address, to a ping that was sent after that time: an answer to
        an earlier one may be by the process before the writer. And the writer itself has been silent until then, or
        else two that live were given the same address.
        """
        heard = self._control.last_heard(writer.boot_id)
        silent_since = asked_after if heard is None else max(asked_after, heard + SILENCE_S)
        return self._replaced_after(writer, silent_since)

    def _replaced_after(self, node: Peer, asked_after: float) -> bool:
        """Whether another process has answered a ping to the node's address that was sent after that time."""
        answer = self._control.answer_at(node.address)
        return answer is not None and answer.boot_id != node.boot_id and answer.asked_at > asked_after


def _remember(found: OrderedDict[Peer, Fault], node: Peer, fault: Fault) -> None:
    found[node] = fault
    if len(found) > _REMEMBERED:
        found.popitem(last=False)
