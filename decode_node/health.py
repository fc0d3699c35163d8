"""Which prefill nodes do what they were asked to, and which are dead: judged by what is heard of them."""

from collections import OrderedDict
from typing import TypeVar

from control.messages import Peer
from control.plane import ControlPlane
from decode_node.attempt import Attempt

SILENCE_S = 2.5
"""After so many seconds without a sign of life a node that has work is taken for unwell, though not for dead."""
_REMEMBERED = 4096

Fault = TypeVar("Fault")


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

    @property
    def stuck(self) -> set[Peer]:
        """Nodes that answer pings and do not get on. Only their answer to Holding shows that this is over."""
        return set(self._stuck)

    def trouble(self, attempt: Attempt, now: float) -> str | None:
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
        missing = "made no progress" if attempt.accepted else "not accepted it"
        return f"prefill node {node.address} has {missing} for {self._patience:g} s"

    def suspect(self, node: Peer, now: float) -> None:
        """The node was silent although it has work. It is passed over until it answers a ping that is sent later."""
        _remember(self._silent, node, now)

    def is_well(self, node: Peer) -> bool:
        """Whether nothing is wrong with a node, as far as is known."""
        since = self._silent.get(node)
        if since is not None and (self._control.alive_after(node.boot_id) or 0.0) > since:
            del self._silent[node]
        return node not in self._silent and node not in self._stuck

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
