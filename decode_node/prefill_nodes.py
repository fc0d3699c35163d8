"""Which prefill node to ask next, among those that gateways list."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from base.tombstones import Tombstones
from control.messages import Peer
from control.plane import ControlPlane
from decode_node.health import Health
from decode_node.request import Request

_FORGOTTEN_AFTER_S = 30.0
"""A gateway's list is dropped when the gateway was silent for so long while others still send theirs every second."""

_NO_RANKS: Mapping[str, tuple[Peer, ...]] = MappingProxyType({})


@dataclass(frozen=True)
class _GatewayList:
    """The prefill nodes that a gateway listed, and when. longest_prompts: tokens that a boot takes, as far as known.
    ranks: the other processes of nodes that have several."""

    at: float
    nodes: tuple[Peer, ...]
    longest_prompts: Mapping[str, int]
    ranks: Mapping[str, tuple[Peer, ...]]


class PrefillNodes:
    """The prefill nodes that gateways list, and which of them may be asked. One loop calls it."""

    def __init__(self, control: ControlPlane, health: Health) -> None:
        self._control = control
        self._health = health
        self._by_gateway: dict[str, _GatewayList] = {}
        """The newest comes last."""
        self._listed: Mapping[str, Peer] = {}
        """All listed nodes by address. Made with each list, since waiting requests ask in every turn of the loop."""
        self._longest_prompts: Mapping[str, int] = {}
        """By boot id, of all lists."""
        self._retired: Tombstones[str] = Tombstones()
        """Boots that take no more requests."""

    @property
    def known(self) -> set[Peer]:
        return {node for listed in self._by_gateway.values() for node in listed.nodes}

    def learn(
        self,
        gateway: str,
        nodes: tuple[Peer, ...],
        longest_prompts: Mapping[str, int],
        ranks: Mapping[str, tuple[Peer, ...]] = _NO_RANKS,
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
        """Never ask these processes again, whoever still lists them: they are shutting down."""
        for boot_id in boot_ids:
            self._retired.add(boot_id)

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
        untried = [node for node in usable if node.boot_id not in request.tried]
        return next(iter(untried or usable), None)

    def ranks_of(self, node: Peer, request: Request) -> tuple[Peer, ...]:
        """The other processes of a node that was chosen for the request: they will write to its slots, too."""
        named = [request.generate.prefill_ranks, *(listed.ranks for listed in self._by_gateway.values())]
        return next((ranks[node.boot_id] for ranks in named if node.boot_id in ranks), ())

    def _is_usable(self, node: Peer) -> bool:
        return not (node.boot_id in self._retired or self._control.is_revoked(node)) and self._health.is_well(node)
