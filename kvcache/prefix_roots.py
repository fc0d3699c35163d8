"""The roots of the prefix cache's tree: one for each salt that has blocks."""


class PrefixRoots:
    """Knows the root of a salt while it has children. Roots are negative numbers, nodes are not."""

    def __init__(self) -> None:
        self._roots: dict[str, int] = {}
        self._salts: dict[int, str] = {}
        self._children: dict[int, int] = {}
        self._freed: list[int] = []

    def find(self, salt: str) -> int | None:
        return self._roots.get(salt)

    def open(self, salt: str) -> int:
        """The root of a salt, a new one if there is none. The caller gives it a child."""
        root = self._roots.get(salt)
        if root is None:
            root = self._freed.pop() if self._freed else -1 - len(self._roots)
            self._roots[salt], self._salts[root], self._children[root] = root, salt, 0
        return root

    def gained_child(self, root: int) -> None:
        self._children[root] += 1

    def lost_child(self, root: int) -> None:
        self._children[root] -= 1
        if not self._children[root]:
            del self._children[root]
            del self._roots[self._salts.pop(root)]
            self._freed.append(root)

    def children(self) -> dict[int, int]:
        """How many children each root has, for checks."""
        return dict(self._children)
