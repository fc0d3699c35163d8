"""Tables of bounded size: they forget what was set longest ago."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

REMEMBERED = 65536
"""Keys of what is over, so that a delayed repeat of a message does not start it again. A message is repeated for
seconds, so older ones may be forgotten."""

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
