"""The prefill nodes that gateways list: which of them is asked next, and which are unhealthy or dead."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from base.tombstones import REMEMBERED, LatestDict
from control.messages import Peer
from control.plane import ControlPlane
from decode_node.attempt import AttemptState, PrefillAttempt
from decode_node.request import Request

SILENCE_S = 2.5
"""A node that has work and was silent for this time is unhealthy. It does not count as dead."""
FAILURES = 3
"""A node that failed this number of different requests in a row is passed over."""
TRIAL_AFTER_S = 10.0
"""Time after the last failure when such a node gets one request on trial."""
_REMEMBERED = 4096
_FORGOTTEN_AFTER_S = 30.0
"""A gateway's list is dropped if the gateway is silent for this time while others send theirs every second."""


@dataclass
class _Faults:
    """What is wrong with a node. Failures count in a row, each request once."""

    silent_since: float | None = None
    """When it was found silent (time.monotonic)."""
    is_stuck: bool = False
    stuck_in: int | None = None
    """The forward pass that it was found stuck in; None if it reported none."""
    failed_requests: set[str] = field(default_factory=set)
    failed_at: float = 0.0
    trial: str | None = None
    """The request that tries the node again after failures."""


@dataclass(frozen=True)
class _GatewayList:
    """The prefill nodes that a gateway listed, and when. longest_prompts: tokens that a boot takes, as far as known.
    ranks: the other processes of nodes that have several."""

    at: float
    nodes: tuple[Peer, ...]
    longest_prompts: Mapping[str, int]
    ranks: Mapping[str, tuple[Peer, ...]]


class PrefillNodes:
    """Remembers the faults of prefill nodes until the nodes show that the faults are over. One loop calls it.

    patience: seconds that a node may take to accept a request, or to make progress with those that it computes.
    """

    def __init__(self, control: ControlPlane, patience: float) -> None:
        self._control = control
        self._patience = patience
        self._faults: OrderedDict[Peer, _Faults] = OrderedDict()
        self._by_gateway: dict[str, _GatewayList] = {}
        """The newest comes last."""
        self._listed: Mapping[str, Peer] = {}
        """All listed nodes by address. Made with each list, since waiting requests ask in every turn of the loop."""
        self._longest_prompts: Mapping[str, int] = {}
        """By boot id, of all lists."""
        self._retired: LatestDict[str, None] = LatestDict(REMEMBERED)
        """Boots that take no more requests."""

    @property
    def known(self) -> set[Peer]:
        return {node for listed in self._by_gateway.values() for node in listed.nodes}

    def learn(
        self,
        gateway: str,
        nodes: tuple[Peer, ...],
        longest_prompts: Mapping[str, int],
        ranks: Mapping[str, tuple[Peer, ...]] = MappingProxyType({}),
    ) -> None:
        """Take the list of the gateway at that address, in order of preference.

        Lists of gateways that have gone silent are dropped, but not if all are silent: then the last lists stand.
        """
        now = time.monotonic()
        others = {
            other: listed
            for other, listed in self._by_gateway.items()
            if other != gateway and now - listed.at < _FORGOTTEN_AFTER_S
        }
        self._by_gateway = {**others, gateway: _GatewayList(now, nodes, longest_prompts, ranks)}
        lists = self._by_gateway.values()
        self._listed = {node.address: node for listed in lists for node in listed.nodes}
        self._longest_prompts = {boot: most for listed in lists for boot, most in listed.longest_prompts.items()}

    def retire(self, *boot_ids: str) -> None:
        """Never ask these processes again, even if a gateway lists them: they are shutting down."""
        for boot_id in boot_ids:
            self._retired[boot_id] = None

    def choose(self, request: Request) -> Peer | None:
        """The node to try next for a request, or None if there is none.

        The request's own ranking comes first, as far as gateways still list the nodes; then other listed nodes; then
        unlisted ones of the ranking. A node whose key was revoked is never asked. If none of them takes so long a
        prompt, one is asked anyway, and its refusal names the limit.
        """
        ranking, prompt_tokens = request.generate.prefill_nodes, request.kv_tokens
        listed, longest = self._listed, self._longest_prompts
        ranked = [listed[node.address] for node in ranking if node.address in listed]
        ranked += [*listed.values(), *(node for node in ranking if node.address not in listed)]
        able = [node for node in ranked if longest.get(node.boot_id, prompt_tokens) >= prompt_tokens]
        usable = [node for node in able or ranked if self._is_usable(node)]
        best = [node for node in usable if node.boot_id not in request.failed_nodes]
        return next(iter(best or usable), None)

    def ranks_of(self, node: Peer, request: Request) -> tuple[Peer, ...]:
        """The other processes of a node that was chosen for the request: they will write to its slots, too."""
        named = [request.generate.prefill_ranks, *(listed.ranks for listed in self._by_gateway.values())]
        return next((ranks[node.boot_id] for ranks in named if node.boot_id in ranks), ())

    # --- health ---

    @property
    def stuck(self) -> set[Peer]:
        """Nodes that answer pings and make no progress. Only their answer to Holding shows that this is over."""
        return {node for node, faults in self._faults.items() if faults.is_stuck}

    def failure_reason(self, attempt: PrefillAttempt, now: float) -> str | None:
        """Why an attempt should be given up, or None. A silent or stuck node is then passed over until it recovers."""
        node = attempt.node
        heard = max(self._control.last_heard(node.boot_id) or 0.0, attempt.dispatched_at)
        if self._replaced_after(node, attempt.dispatched_at):
            return f"prefill node {node.address} was restarted"
        if now - heard > SILENCE_S:
            # It is passed over until it answers a ping that is sent later.
            self._faults_of(node).silent_since = now
            return f"prefill node {node.address} is silent"
        if now - attempt.progressed_at <= self._patience:
            return None
        faults = self._faults_of(node)
        faults.is_stuck, faults.stuck_in = True, attempt.current_pass
        missing = "not accepted it" if attempt.state is AttemptState.REQUESTED else "made no progress"
        return f"prefill node {node.address} has {missing} for {self._patience:g} s"

    def is_healthy(self, node: Peer) -> bool:
        faults = self._faults.get(node, _Faults())
        if faults.silent_since is not None and (self._control.alive_after(node.boot_id) or 0.0) > faults.silent_since:
            faults.silent_since = None
        may_be_tried = faults.trial is None and time.monotonic() - faults.failed_at >= TRIAL_AFTER_S
        is_failing = len(faults.failed_requests) >= FAILURES and not may_be_tried
        return not (faults.silent_since is not None or faults.is_stuck or is_failing)

    def begun(self, node: Peer, request_id: str) -> None:
        """The node was asked to prefill a request. If the node is passed over for failures, this is its trial."""
        faults = self._faults.get(node)
        if faults is not None and len(faults.failed_requests) >= FAILURES:
            faults.trial = request_id

    def failed(self, node: Peer, request_id: str) -> None:
        """The node failed a request: it said so, or what it sent was wrong."""
        faults = self._faults_of(node)
        faults.failed_requests.add(request_id)
        faults.failed_at = time.monotonic()

    def ended(self, attempt: PrefillAttempt) -> None:
        """Take the end of an attempt: one that landed clears its node's failures, any other ends a trial."""
        if (faults := self._faults.get(attempt.node)) is None:
            return
        if attempt.state is AttemptState.LANDED:
            faults.failed_requests.clear()
        if attempt.state is AttemptState.LANDED or faults.trial == attempt.id.request_id:
            faults.trial = None

    def note_pass(self, node: Peer, current_pass: int | None) -> None:
        """The node reports its forward pass. Another one than it was stuck in shows that it makes progress again."""
        faults = self._faults.get(node)
        if faults is not None and (faults.stuck_in is None or faults.stuck_in != current_pass):
            faults.is_stuck = False

    def is_dead(self, writer: Peer, asked_after: float) -> bool:
        """Whether the process is proved to have ended, so that it writes nothing more.

        The proof: another process at its address answered a ping that was sent after `asked_after` (an earlier answer
        may come from the process before the writer), and after the writer had been silent for SILENCE_S (otherwise
        both may live, with the same address by mistake).
        """
        heard = self._control.last_heard(writer.boot_id)
        return self._replaced_after(writer, asked_after if heard is None else max(asked_after, heard + SILENCE_S))

    def _is_usable(self, node: Peer) -> bool:
        return not (node.boot_id in self._retired or self._control.is_revoked(node)) and self.is_healthy(node)

    def _replaced_after(self, node: Peer, asked_after: float) -> bool:
        """Whether another process at the node's address answered a ping that was sent after that time."""
        answer = self._control.answer_at(node.address)
        return answer is not None and answer.boot_id != node.boot_id and answer.asked_at > asked_after

    def _faults_of(self, node: Peer) -> _Faults:
        if node not in self._faults and len(self._faults) >= _REMEMBERED:
            self._faults.popitem(last=False)
        return self._faults.setdefault(node, _Faults())
