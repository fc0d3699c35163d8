"""Which prefill node is asked next: those that gateways name, in a request's order, without those that are unwell."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from base.tombstones import Tombstones
from control.messages import Peer
from control.plane import ControlPlane
from decode_node.health import Health

_FORGOTTEN_AFTER_S = 30.0
"""What a gateway said counts so long while others go on saying something. They do every second."""


@dataclass(frozen=True)
class _Said:
    """What a gateway said of prefill nodes, and when. `longest_prompts`: tokens that a boot takes, as far as known."""

    at: float
    nodes: tuple[Peer, ...]
    longest_prompts: Mapping[str, int]


class PrefillNodes:
    """The prefill nodes that gateways know, and which of them may be asked. One loop calls it."""

    def __init__(self, control: ControlPlane, health: Health) -> None:
        self._control = control
        self._health = health
        self._by_gateway: dict[str, _Said] = {}
        """The last to speak comes last."""
        self._retired: Tombstones[str] = Tombstones()
        """Boots that said that they take no more requests."""

    @property
    def known(self) -> set[Peer]:
        return {node for said in self._by_gateway.values() for node in said.nodes}

    def learn(self, gateway: str, nodes: tuple[Peer, ...], longest_prompts: Mapping[str, int]) -> None:
        """The prefill nodes that the gateway at that address knows, in order of preference, and what they take.

        What a gateway that has died once said is older than what others say, and then forgotten; if all are silent,
        their last words stand.
        """
        now = time.monotonic()
        others = {
            other: said
            for other, said in self._by_gateway.items()
            if other != gateway and now - said.at < _FORGOTTEN_AFTER_S
        }
        self._by_gateway = {**others, gateway: _Said(now, nodes, longest_prompts)}

    def retire(self, *boot_ids: str) -> None:
        """These processes leave: none of them is asked again, whoever still names it."""
        for boot_id in boot_ids:
            self._retired.add(boot_id)

    def choose(self, ranking: Sequence[Peer], tried: Collection[str], prompt_tokens: int) -> Peer | None:
        """The next node to try for a request with this ranking, which has tried these boots; None if there is none.

        The request's own ranking comes first, as far as gateways still know the nodes; then what else they know; a
        node that no gateway names any more comes last, and one whose key was revoked never. If none of them takes so
        long a prompt, they are asked all the same, and say so.
        """
        current = {node.address: node for said in self._by_gateway.values() for node in said.nodes}
        longest = {boot: tokens for said in self._by_gateway.values() for boot, tokens in said.longest_prompts.items()}
        ranked = [current[node.address] for node in ranking if node.address in current]
        ranked += [*current.values(), *(node for node in ranking if node.address not in current)]
        able = [node for node in ranked if longest.get(node.boot_id, prompt_tokens) >= prompt_tokens]
        usable = [node for node in able or ranked if self._is_usable(node)]
        untried = [node for node in usable if node.boot_id not in tried]
        return next(iter(untried or usable), None)

    def _is_usable(self, node: Peer) -> bool:
        return not (node.boot_id in self._retired or self._control.is_revoked(node)) and self._health.is_well(node)
