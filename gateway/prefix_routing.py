"""Which node takes a request: which prefixes each node has cached, weighed against load.

Nodes know exactly and compare token ids. The gateway keeps 64-bit hashes (`base.block_hashes`), and what it thinks
may be out of date: a wrong guess costs a hit and never a wrong token. Nodes send updates (`control.membership`), and
a whole one when the acknowledged serial shows that one was missed. So the index is right again after a restart of
either side, and applying an update twice is applying it once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from base.block_hashes import BLOCK_TOKENS, BlockHashes
from control.messages import CacheUpdate

TOLERANCE = 1.0
"""Part of the mean load by which a node may be fuller than the emptiest one before its load counts."""


@dataclass
class _NodeBlocks:
    """known: hashes, the one that was used last at the end. serial: of the last update."""

    known: dict[int, None] = field(default_factory=dict)
    serial: int = 0


class PrefixIndex:
    """Blocks by boot id, of each node the last used `max_blocks`. A block takes 100 bytes. The event loop owns it."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._nodes: dict[str, _NodeBlocks] = {}

    def apply(self, boot_id: str, update: CacheUpdate) -> None:
        """Note an update, unless it came before. If one before it is missing, `serial` stays as it is."""
        node = self._nodes.setdefault(boot_id, _NodeBlocks())
        if update.serial <= node.serial:
            return
        if update.whole:
            node.known.clear()
        for name in update.lost_hashes.tolist():
            node.known.pop(name, None)
        self._use(node, update.gained_hashes.tolist())
        if update.whole or update.serial == node.serial + 1:
            node.serial = update.serial

    def serial(self, boot_id: str) -> int:
        """Of a node's last update before which none is missing; 0 if there is none."""
        return self._nodes.get(boot_id, _NodeBlocks()).serial

    def forget(self, boot_id: str) -> None:
        self._nodes.pop(boot_id, None)

    def blocks(self, boot_id: str) -> int:
        return len(self._nodes.get(boot_id, _NodeBlocks()).known)

    def matched(self, hashes: BlockHashes) -> dict[str, int]:
        """By boot id, how many first tokens of a prompt a node has; they count as used. hashes: uint64 [blocks]."""
        names = hashes.tolist()
        found = {}
        for boot_id, node in self._nodes.items():
            blocks = sum(1 for _ in takewhile(node.known.__contains__, names))
            self._use(node, names[:blocks])
            found[boot_id] = blocks * BLOCK_TOKENS
        return found

    def _use(self, node: _NodeBlocks, newest_first: list[int]) -> None:
        """Put blocks at the new end, and drop those at the old end that are too many."""
        known = node.known
        for name in reversed(newest_first):
            known.pop(name, None)
            known[name] = None
        while len(known) > self._max_blocks:
            del known[next(iter(known))]


def ranked(load: Mapping[str, int], cached: Mapping[str, int]) -> list[str]:
    """The nodes, first that for which cached tokens of the prompt, less tokens of load that are too many, are the most.

    load: outstanding tokens of each node, by any name. cached: tokens of the prompt that a node has, 0 where it is
    missing. A token that is cached outweighs one token that the node is fuller than the emptiest one, and of that as
    much as the mean load counts for nothing: so sessions do not move for small differences, and a long prefix moves
    only for a large one. Of equal nodes the emptiest comes first, and then the first.
    """
    if not load:
        return []
    tolerated = min(load.values()) + TOLERANCE * sum(load.values()) / len(load)

    def worth(node: str) -> tuple[float, int]:
        return cached.get(node, 0) - max(0.0, load[node] - tolerated), -load[node]

    return sorted(load, key=worth, reverse=True)
