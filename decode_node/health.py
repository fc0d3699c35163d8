"""Which prefill nodes are unwell or dead, judged by what is heard of them."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from control.messages import Peer
from control.plane import ControlPlane
from decode_node.attempt import AttemptState, PrefillAttempt

SILENCE_S = 2.5
"""A node that has work and was not heard for so long counts as unwell, though not as dead."""
FAILURES = 3
"""A node that failed so many different requests in a row is passed over."""
TRIAL_AFTER_S = 10.0
"""So long after its last failure such a node gets one request on trial."""
_REMEMBERED = 4096

Fault = TypeVar("Fault")


@dataclass
class _Failures:
    """A node's failures in a row: of which requests, when the last was, and which request is on trial there."""

    requests: set[str] = field(default_factory=set)
    last_at: float = 0.0
    trial: str | None = None

    def may_be_asked(self, now: float) -> bool:
        return len(self.requests) < FAILURES or (self.trial is None and now - self.last_at >= TRIAL_AFTER_S)


class Health:
    """Remembers the faults of prefill nodes until the nodes show that the faults are over. One loop calls it.

    `patience`: seconds that a node may take to accept a request, or to make progress with those that it computes.
    """

    def __init__(self, control: ControlPlane, patience: float) -> None:
        self._control = control
        self._patience = patience
        self._silent: OrderedDict[Peer, float] = OrderedDict()
        """When each was found silent (time.monotonic)."""
        self._stuck: OrderedDict[Peer, int | None] = OrderedDict()
        """The forward pass that each was found stuck in; None if it reported none."""
        self._failing: OrderedDict[Peer, _Failures] = OrderedDict()

    @property
    def stuck(self) -> set[Peer]:
        """Nodes that answer pings and make no progress. Only their answer to Holding shows that this is over."""
        return set(self._stuck)

    def trouble(self, attempt: PrefillAttempt, now: float) -> str | None:
        """Why an attempt should be given up, or None. A silent or stuck node is then passed over until it recovers."""
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
        """Pass the node over until it answers a ping that is sent later: it was silent although it has work."""
        _remember(self._silent, node, now)

    def is_well(self, node: Peer) -> bool:
        """Whether no fault of the node is known."""
        since = self._silent.get(node)
        if since is not None and (self._control.alive_after(node.boot_id) or 0.0) > since:
            del self._silent[node]
        failing = self._failing.get(node)
        may_be_asked = failing is None or failing.may_be_asked(time.monotonic())
        return node not in self._silent and node not in self._stuck and may_be_asked

    def begun(self, node: Peer, request_id: str) -> None:
        """The node was asked to prefill a request. If the node is passed over for failures, this is its trial."""
        failing = self._failing.get(node)
        if failing is not None and len(failing.requests) >= FAILURES:
            failing.trial = request_id

    def failed(self, node: Peer, request_id: str) -> None:
        """The node failed a request: it said so, or what it sent was wrong."""
        failing = self._failing.get(node) or _Failures()
        failing.requests.add(request_id)
        failing.last_at = time.monotonic()
        _remember(self._failing, node, failing)

    def ended(self, attempt: PrefillAttempt) -> None:
        """Take the end of an attempt: one that landed clears its node's failures, any other ends a trial."""
        failing = self._failing.get(attempt.node)
        if attempt.state is AttemptState.LANDED:
            self._failing.pop(attempt.node, None)
        elif failing is not None and failing.trial == attempt.id.request_id:
            failing.trial = None

    def note_pass(self, node: Peer, current_pass: int | None) -> None:
        """The node reports its forward pass. Another one than it was stuck in shows that it makes progress again."""
        stuck_in = self._stuck.get(node)
        if stuck_in is None or stuck_in != current_pass:
            self._stuck.pop(node, None)

    def is_dead(self, writer: Peer, asked_after: float) -> bool:
        """Whether the process is proved to have ended, so that it writes nothing more.

        The proof: another process at its address answered a ping that was sent after `asked_after` (an earlier answer
        may come from the process before the writer), and after the writer had been silent for SILENCE_S (otherwise
        both may live, with the same address by mistake).
        """
        heard = self._control.last_heard(writer.boot_id)
        return self._replaced_after(writer, asked_after if heard is None else max(asked_after, heard + SILENCE_S))

    def _replaced_after(self, node: Peer, asked_after: float) -> bool:
        """Whether another process at the node's address answered a ping that was sent after that time."""
        answer = self._control.answer_at(node.address)
        return answer is not None and answer.boot_id != node.boot_id and answer.asked_at > asked_after


def _remember(faults: OrderedDict[Peer, Fault], node: Peer, fault: Fault) -> None:
    faults[node] = fault
    if len(faults) > _REMEMBERED:
        faults.popitem(last=False)
