"""Keys that are over, remembered so that a delayed repeat does not start them again."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Tombstones(Generic[Key]):
    """The last `limit` keys that were added. A message is repeated for seconds, so old ones may be forgotten."""

    def __init__(self, limit: int = 65536) -> None:
        self._limit = limit
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)
