"""The nodes of the prefix cache's tree, as tables."""

from kvcache.block_store import BlockRun
from kvcache.int_table import ENTRY_BYTES, NONE, int_table


class PrefixNodes:
    """Up to `capacity` nodes, known by number. A node is a run of blocks behind the last block of its parent.

    Tables and no objects: a node costs the same 20 bytes whatever it holds, where an object with its fields would cost
    hundreds. Per node:

    start, length: its run of places in the store. parent: a node, or a negative number, which is a root.
    holders: those who hold all blocks from the root to the end of the node. pinned_children: its children that are
    pinned. A node is *pinned* while it has either, so all nodes above a holder's are pinned.
    """

    def __init__(self, capacity: int) -> None:
        self.start = int_table(capacity)
        self.length = int_table(capacity)
        self.parent = int_table(capacity)
        self.holders = int_table(capacity)
        self.pinned_children = int_table(capacity)
        self.num_used = 0
        self._capacity = capacity
        self._ever_used = 0
        """The nodes from here on were never used."""
        self._freed: int = NONE
        """First of a list of nodes that were freed, linked by `parent`."""

    @property
    def bookkeeping_bytes(self) -> int:
        return 5 * ENTRY_BYTES * self._capacity

    def create(self, parent: int, run: BlockRun) -> int:
        """A new node that nobody holds. There is one for every block, so they do not run out."""
        if self._freed != NONE:
            node, self._freed = self._freed, self.parent[self._freed]
        else:
            node = self._ever_used
            self._ever_used += 1
        self.num_used += 1
        self.parent[node] = parent
        self.start[node], self.length[node] = run.start, run.length
        self.holders[node] = self.pinned_children[node] = 0
        return node

    def free(self, node: int) -> None:
        self.num_used -= 1
        self.length[node] = 0
        self.parent[node], self._freed = self._freed, node

    def run(self, node: int) -> BlockRun:
        return BlockRun(self.start[node], self.length[node])

    def pinned(self, node: int) -> bool:
        return self.holders[node] > 0 or self.pinned_children[node] > 0

    def used(self) -> list[int]:
        """All nodes in use, for checks."""
        return [node for node in range(self._ever_used) if self.length[node]]
