"""What the prefix tree is compared with: a dictionary of blocks, each under its salt and all blocks up to it."""

from collections import Counter
from dataclasses import dataclass

Spelled = tuple[str, tuple[str, ...]]
"""A salt and the names of blocks: the prefix that ends with the last of them."""


@dataclass
class ModelBlock:
    """age: when it was used last, and, of one use, the last block of the prompt first."""

    values: tuple[int, ...]
    age: tuple[int, int]


class PrefixModel:
    def __init__(self) -> None:
        self.blocks: dict[Spelled, ModelBlock] = {}
        self.held: Counter[Spelled] = Counter()
        self._now = 0

    @property
    def evictable(self) -> int:
        return len(self.blocks.keys() - self.held.keys())

    def lookup(self, salt: str, names: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Values of the longest prefix of which every block is there."""
        found = []
        for end in range(1, len(names) + 1):
            if (salt, names[:end]) not in self.blocks:
                break
            found.append(self.blocks[salt, names[:end]].values)
        self._use([(salt, names[:end]) for end in range(1, len(found) + 1)])
        return found

    def insert(self, salt: str, names: tuple[str, ...], values: list[tuple[int, ...]]) -> None:
        prefixes = [(salt, names[:end]) for end in range(1, len(names) + 1)]
        for prefix, given in zip(prefixes, values, strict=True):
            self.blocks.setdefault(prefix, ModelBlock(given, (0, 0)))
        self._use(prefixes)

    def retain(self, salt: str, names: tuple[str, ...]) -> None:
        self.held.update((salt, names[:end]) for end in range(1, len(names) + 1))

    def release(self, salt: str, names: tuple[str, ...]) -> None:
        prefixes = [(salt, names[:end]) for end in range(1, len(names) + 1)]
        self.held.subtract(prefixes)
        self.held = +self.held
        self._use([prefix for prefix in prefixes if prefix not in self.held])

    def evict(self, count: int) -> list[tuple[int, ...]]:
        """Values of the oldest blocks that nobody holds. That they are ends of prompts is checked, not arranged."""
        gone = []
        for _ in range(min(count, self.evictable)):
            salt, names = min(self.blocks.keys() - self.held.keys(), key=lambda prefix: self.blocks[prefix].age)
            assert not any(s == salt and n[:-1] == names for s, n in self.blocks), "the oldest block is no leaf"
            gone.append(self.blocks.pop((salt, names)).values)
        return gone

    def _use(self, prefixes: list[Spelled]) -> None:
        self._now += 1
        for prefix in prefixes:
            self.blocks[prefix].age = (self._now, -len(prefix[1]))
