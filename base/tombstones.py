"""Tables of bounded size: they forget what was set longest ago."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

HashableT = TypeVar("HashableT", bound=Hashable)
ValueT = TypeVar("ValueT")


class LatestDict(OrderedDict[HashableT, ValueT]):
    """A dict of at most `limit` keys: beyond it, the one that was set longest ago goes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: HashableT, value: ValueT) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


class Tombstones(Generic[HashableT]):
    """The last `limit` keys that are over, so that a delayed repeat of a message does not start them again.

    A message is repeated for seconds, so old keys may be forgotten.
    """

    def __init__(self, limit: int = 65536) -> None:
        self._keys: LatestDict[HashableT, None] = LatestDict(limit)

    def __contains__(self, key: HashableT) -> bool:
        return key in self._keys

    def add(self, key: HashableT) -> None:
        self._keys[key] = None
