"""The nodes that this gateway knows, and which of them takes the next request.

A node is *live* while its heartbeats arrive and it is not leaving; only live nodes get requests. A silent node is used
again as soon as it is heard, and forgotten after a minute. Pure logic: time is an argument, messages are return values.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from base.block_hashes import BLOCK_TOKENS, BlockHashes
from control.messages import (
    CacheUpdate,
    CheckpointIdentity,
    Heartbeat,
    HeartbeatAck,
    Peer,
    Refused,
    Register,
    Registered,
    Role,
)
from gateway.prefix_routing import PrefixIndex, ranked

SILENT_AFTER_S = 3.0
FORGOTTEN_AFTER_S = 60.0
_NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})

NodeState = Literal["ready", "not ready", "leaving", "lost"]
"""lost: silent. leaving: it takes no new requests and finishes those that it has."""


@dataclass
class Node:
    """One registered process."""

    peer: Peer
    offer: Register
    beat: Heartbeat
    """The last one; before the first, one that says that the node is ready and has nothing to do."""
    last_heartbeat: float
    leaving: bool = False
    lost: bool = False
    """Whether it was found silent, at the last look."""
    served: Counter[str] = field(default_factory=Counter)
    """Tokens of requests of this gateway that it has no more: `generated`, and of prompts `prompt` and `cached`."""
    assigned_tokens: int = 0
    """Sent by this gateway since the last heartbeat."""

    @property
    def load(self) -> int:
        return self.beat.queued_tokens + self.assigned_tokens

    def live(self, now: float) -> bool:
        return not self.leaving and now - self.last_heartbeat <= SILENT_AFTER_S

    def state(self, now: float) -> NodeState:
        if now - self.last_heartbeat > SILENT_AFTER_S:
            return "lost"
        return "leaving" if self.leaving else "ready" if self.beat.ready else "not ready"


@dataclass(frozen=True)
class Capacity:
    """The largest request that can be served now, in tokens. context: of prompt and output; prompt: of the prompt."""

    context: int
    prompt: int


class NodeRegistry:
    """Known nodes. Not thread safe: the gateway's event loop owns it."""

    def __init__(self, checkpoint: CheckpointIdentity | None = None, caches: PrefixIndex | None = None) -> None:
        """checkpoint: this gateway's, which nodes must have. caches: what nodes have; None if it does not matter."""
        self._checkpoint = checkpoint
        self._caches = caches
        self.nodes: dict[str, Node] = {}
        """By address, all that are registered, the silent ones included until they are forgotten."""

    def register(self, peer: Peer, offer: Register, now: float) -> Registered | Refused:
        """Register a node, or say how it differs from the live nodes. A new boot at an address replaces the old one."""
        self._forget_silent(now)
        if self.replaced(peer):
            self._forget(peer)
        if peer.role != offer.role:
            return Refused(via=offer.via, reason=f"a {peer.role} process cannot register as {offer.role} node")
        if reason := self._mismatch_reason(peer, offer, now):
            self._forget(peer)
            return Refused(via=offer.via, reason=f"{offer.role} node {peer.address} refused: {reason}")
        if known := self._find(peer):
            known.offer, known.last_heartbeat, known.leaving = offer, now, False
        else:
            idle = Heartbeat(via=offer.via, ready=True, queued_tokens=0)
            self.nodes[peer.address] = Node(peer, offer, idle, last_heartbeat=now)
        return Registered(via=offer.via)

    def knows(self, peer: Peer) -> bool:
        """Whether this very process is registered, rather than another boot at its address."""
        return self._find(peer) is not None

    def heartbeat(self, peer: Peer, beat: Heartbeat, now: float) -> HeartbeatAck:
        """Note a node's load. A node that is unknown, or that differs from the others by now, must register again."""
        self._forget_silent(now)
        node = self._find(peer)
        if node is not None and not (node.leaving or node.live(now)) and self._mismatch_reason(peer, node.offer, now):
            self._forget(peer)
            node = None
        if node is None:
            return HeartbeatAck(via=beat.via, known=False)
        node.beat, node.last_heartbeat, node.assigned_tokens = beat, now, 0
        return HeartbeatAck(
            via=beat.via,
            known=True,
            **self.for_prefill(now),
            leaving=tuple(n.peer.boot_id for n in self.nodes.values() if n.offer.role == "prefill" and n.leaving),
            cache_serial=None if self._caches is None else self._caches.serial(peer.boot_id),
        )

    def leave(self, peer: Peer) -> None:
        """Send no new request to that process. It stays registered, since it may still finish others."""
        if node := self._find(peer):
            node.leaving = True

    def liveness_changes(self, now: float) -> list[tuple[Peer, bool]]:
        """Nodes that have fallen silent since the last call, or are heard again, and whether they are live."""
        changed = [n for n in self.nodes.values() if not n.leaving and n.lost is n.live(now)]
        for node in changed:
            node.lost = not node.lost
        return [(node.peer, not node.lost) for node in changed]

    def pick_decode(
        self,
        tokens: int,
        exclude: Collection[str],
        now: float,
        cached: Mapping[str, int] = _NOTHING_CACHED,
        avoid: Collection[str] = (),
    ) -> Peer | None:
        """The best usable decode node for that many tokens (`gateway.prefix_routing`). exclude, cached: by boot id.

        avoid: rank groups and boot ids that are used only if there is no other.
        """
        candidates = [
            node
            for node in self._usable_decode(now)
            if node.peer.boot_id not in exclude and node.offer.max_request_tokens >= tokens
        ]
        others = [node for node in candidates if not {node.offer.rank_group, node.peer.boot_id} & set(avoid)]
        return next(iter(_ranked(others or candidates, cached)), None)

    def rank_group(self, peer: Peer) -> str:
        """Of that process: the same for all that die with it. Empty if it is a node of its own, or unknown."""
        node = self._find(peer)
        return "" if node is None else node.offer.rank_group

    def for_prefill(
        self, now: float, prompt_tokens: int = 0, cached: Mapping[str, int] = _NOTHING_CACHED
    ) -> dict[str, Any]:
        """Fields of messages to decode nodes: ready prefill nodes, the best first. Those that take no such prompt come
        last. cached, the longest prompt that each takes, and the other ranks of each that has some: by boot id."""
        ready = self._ready_prefill(now)
        able = [node for node in ready if node.offer.max_request_tokens >= prompt_tokens]
        others = [node for node in ready if node.offer.max_request_tokens < prompt_tokens]
        return {
            "prefill_nodes": (*_ranked(able, cached), *_ranked(others, cached)),
            "longest_prompts": {node.peer.boot_id: node.offer.max_request_tokens for node in ready},
            "prefill_ranks": {node.peer.boot_id: node.offer.ranks for node in ready if node.offer.ranks},
        }

    def candidates(self, role: Role, now: float, cached: Mapping[str, int]) -> list[str]:
        """For traces, the nodes that can take requests with what they are chosen by. cached: by boot id."""
        nodes = self._ready_prefill(now) if role == "prefill" else self._usable_decode(now)
        return [f"{node.peer.address} cached={cached.get(node.peer.boot_id, 0)} load={node.load}" for node in nodes]

    def cached(self, hashes: BlockHashes | None) -> dict[str, int]:
        """How many tokens of a prompt nodes have, by boot id. hashes: uint64 [blocks]; None if they do not matter."""
        return {} if self._caches is None or hashes is None else self._caches.matched(hashes)

    def note_cache(self, peer: Peer, update: CacheUpdate) -> None:
        """What changed in the prefix cache of a node that is registered."""
        if self._caches is not None and self.knows(peer):
            self._caches.apply(peer.boot_id, update)

    def assign(self, peer: Peer, tokens: int) -> None:
        """Count work sent to a node until its next heartbeat reports it."""
        if node := self._find(peer):
            node.assigned_tokens += tokens

    def count_served(self, peer: Peer, tokens: Counter[str]) -> None:
        """Count what a process has done for a request that it has no more, as in `Node.served`."""
        if node := self._find(peer):
            node.served += tokens

    def cached_tokens(self, peer: Peer) -> int | None:
        """How many tokens a node's prefix cache is known to have; None if that does not matter."""
        return None if self._caches is None else self._caches.blocks(peer.boot_id) * BLOCK_TOKENS

    def replaced(self, peer: Peer) -> bool:
        """Whether another boot has that process's address, which proves the process dead."""
        node = self.nodes.get(peer.address)
        return node is not None and node.peer.boot_id != peer.boot_id

    def capacity(self, context_length: int, now: float) -> Capacity:
        """The largest request that the usable nodes take, at most `context_length`, which also holds without nodes."""
        decode = self._usable_decode(now)
        # Decode nodes compute prompts only while there is no prefill node.
        computing = self._ready_prefill(now) or [node for node in decode if node.offer.local_prefill]

        def longest(nodes: list[Node]) -> int:
            return min(context_length, max((n.offer.max_request_tokens for n in nodes), default=context_length))

        return Capacity(context=longest(decode), prompt=longest(computing))

    def unready_reason(self, now: float) -> str | None:
        """What keeps a request from being served now, or None."""
        if self.lacks_prefill(now):
            return "no live prefill node is registered, and no decode node prefills locally"
        return None if self._usable_decode(now) else "no live decode node is registered"

    def lacks_prefill(self, now: float) -> bool:
        """Whether decode nodes are ready, and none can be used, since nobody prefills."""
        return not self._usable_decode(now) and any(node.beat.ready for node in self._live(now, "decode"))

    def count(self, role: Role, now: float) -> int:
        return len(self._live(now, role))

    def kv_usage(self, now: float) -> float:
        """The part of their host slots that requests hold, the mean of the live decode nodes; 0 without any."""
        live = self._live(now, "decode")
        return sum(node.beat.kv_usage for node in live) / max(1, len(live))

    def _find(self, peer: Peer) -> Node | None:
        node = self.nodes.get(peer.address)
        return node if node is not None and node.peer.boot_id == peer.boot_id else None

    def _live(self, now: float, role: Role) -> list[Node]:
        return [node for node in self.nodes.values() if node.offer.role == role and node.live(now)]

    def _ready_prefill(self, now: float) -> list[Node]:
        return [node for node in self._live(now, "prefill") if node.beat.ready]

    def _usable_decode(self, now: float) -> list[Node]:
        prefill = bool(self._ready_prefill(now))
        return [n for n in self._live(now, "decode") if n.beat.ready and (prefill or n.offer.local_prefill)]

    def _mismatch_reason(self, peer: Peer, offer: Register, now: float) -> str | None:
        """How the offer differs from a live node or from this gateway, or None."""
        for other in self.nodes.values():
            if other.peer.address == peer.address or not other.live(now):
                continue
            differences = offer.identity.differences(other.offer.identity)
            theirs = other.offer.transports
            if not differences and offer.role != other.offer.role and not set(offer.transports) & set(theirs):
                differences = f"transfer protocol {'|'.join(offer.transports)} != {'|'.join(theirs)}"
            if differences:
                return f"{differences} of {other.offer.role} node {other.peer.address}"
        if self._checkpoint is not None and offer.checkpoint is not None:
            differences = offer.checkpoint.differences(self._checkpoint)
            return f"{differences} of this gateway" if differences else None
        return None

    def _forget_silent(self, now: float) -> None:
        for node in list(self.nodes.values()):
            if now - node.last_heartbeat > FORGOTTEN_AFTER_S:
                self._forget(node.peer)

    def _forget(self, peer: Peer) -> None:
        """Forget the process that has that address, if one is registered."""
        node = self.nodes.pop(peer.address, None)
        if node is not None and self._caches is not None:
            self._caches.forget(node.peer.boot_id)


def _ranked(nodes: list[Node], cached: Mapping[str, int]) -> list[Peer]:
    """The best first. Boot ids are unique: a process has one."""
    by_boot = {node.peer.boot_id: node for node in nodes}
    return [by_boot[boot].peer for boot in ranked({boot: node.load for boot, node in by_boot.items()}, cached)]
