"""Tables of bounded size: they forget what was noted longest ago."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

HashableT = TypeVar("HashableT", bound=Hashable)
ValueT = TypeVar("ValueT")


def remember(table: OrderedDict[HashableT, ValueT], key: HashableT, value: ValueT, limit: int) -> None:
    """Set a key of a table that holds at most `limit` keys: beyond it, the one that was set longest ago goes."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)


class Tombstones(Generic[HashableT]):
    """The last `limit` keys that are over, so that a delayed repeat of a message does not start them again.

    A message is repeated for seconds, so old keys may be forgotten.
    """

    def __init__(self, limit: int = 65536) -> None:
        self._limit = limit
        self._keys: OrderedDict[HashableT, None] = OrderedDict()

    def __contains__(self, key: HashableT) -> bool:
        return key in self._keys

    def add(self, key: HashableT) -> None:
        remember(self._keys, key, None, self._limit)
