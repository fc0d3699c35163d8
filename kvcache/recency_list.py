"""The order in which nodes of the prefix cache's tree were used."""

from collections.abc import Iterator

from kvcache.int_table import ENTRY_BYTES, NONE, int_table


class RecencyList:
    """Nodes in the order of their last use: a doubly linked list, so that each operation takes the same short time."""

    def __init__(self, capacity: int) -> None:
        self._end = capacity
        """The end of the list at both sides: older than the oldest and newer than the newest."""
        self._older = int_table(capacity + 1)
        self._newer = int_table(capacity + 1)
        self._older[self._end] = self._newer[self._end] = self._end

    @property
    def bookkeeping_bytes(self) -> int:
        return ENTRY_BYTES * (len(self._older) + len(self._newer))

    def oldest(self) -> int:
        """The node that was used longest ago, or NONE."""
        node = self._newer[self._end]
        return NONE if node == self._end else node

    def append(self, node: int) -> None:
        """Put a node in that is not in the list, as the newest."""
        newest = self._older[self._end]
        self._older[node], self._newer[node] = newest, self._end
        self._newer[newest] = self._older[self._end] = node

    def remove(self, node: int) -> None:
        older, newer = self._older[node], self._newer[node]
        self._newer[older], self._older[newer] = newer, older

    def __iter__(self) -> Iterator[int]:
        """From the oldest to the newest."""
        node = self._newer[self._end]
        while node != self._end:
            yield node
            node = self._newer[node]

    def __reversed__(self) -> Iterator[int]:
        """From the newest to the oldest."""
        node = self._older[self._end]
        while node != self._end:
            yield node
            node = self._older[node]
