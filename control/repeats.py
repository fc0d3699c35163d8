"""Messages that are sent again until they are answered."""

import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from control.messages import Message, Peer

SLOWEST_S = 5.0
"""The longest pause between two sendings, to a peer that has been silent for long."""


@dataclass
class Repeated:
    """A message to a peer, every `every` seconds from `since` until `until` (time.monotonic)."""

    peer: Peer
    message: Message
    every: float
    since: float
    until: float


class Repeats:
    """Repeated messages. To a silent peer, pauses are half of its silence. last_heard_at: when an address was heard.

    A call takes no longer if there are many: when a node dies, thousands are aborted at once.
    """

    def __init__(self, last_heard_at: Callable[[str], float | None]) -> None:
        self._last_heard_at = last_heard_at
        self._table: dict[Hashable, Repeated] = {}
        self._queue: list[tuple[float, int, Hashable, Repeated]] = []
        """A heap, by when each is due and then by number. It may have what the table has no more."""
        self._numbers = count()

    @property
    def next_due(self) -> float:
        while self._queue and self._table.get(self._queue[0][2]) is not self._queue[0][3]:
            heappop(self._queue)
        return self._queue[0][0] if self._queue else math.inf

    def add(self, key: Hashable, peer: Peer, message: Message, every: float, give_up_after: float) -> None:
        """Repeat a message. It replaces what is repeated under the key."""
        now = time.monotonic()
        self._table[key] = repeated = Repeated(peer, message, every, since=now, until=now + give_up_after)
        heappush(self._queue, (now, next(self._numbers), key, repeated))

    def forget(self, key: Hashable) -> None:
        self._table.pop(key, None)

    def take_due(self, now: float) -> Iterator[Repeated]:
        """Those to send now, in the order in which they fell due, and once more those whose time is over."""
        while self.next_due <= now:
            _, _, key, repeated = heappop(self._queue)
            heard = self._last_heard_at(repeated.peer.address) or 0.0
            pause = max(repeated.every, min((now - max(heard, repeated.since)) / 2, SLOWEST_S))
            if now < repeated.until:
                heappush(self._queue, (min(now + pause, repeated.until), next(self._numbers), key, repeated))
            else:
                del self._table[key]
            yield repeated
