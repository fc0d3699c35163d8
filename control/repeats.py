"""Messages that are sent again until they are answered."""

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

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
    due: float = 0.0


class Repeats:
    """Repeated messages. To a silent peer, pauses are half of its silence. last_heard_at: when an address was heard."""

    def __init__(self, last_heard_at: Callable[[str], float | None]) -> None:
        self._last_heard_at = last_heard_at
        self._table: dict[Hashable, Repeated] = {}

    @property
    def next_due(self) -> float:
        return min((repeated.due for repeated in self._table.values()), default=float("inf"))

    def add(self, key: Hashable, peer: Peer, message: Message, every: float, give_up_after: float) -> None:
        """Repeat a message. It replaces what is repeated under the key."""
        now = time.monotonic()
        self._table[key] = Repeated(peer, message, every, since=now, until=now + give_up_after)

    def forget(self, key: Hashable) -> None:
        self._table.pop(key, None)

    def take_given_up(self, now: float) -> list[Repeated]:
        """Remove and return those whose time is over."""
        over = {key: repeated for key, repeated in self._table.items() if now > repeated.until}
        for key in over:
            del self._table[key]
        return list(over.values())

    def take_due(self, now: float) -> Iterator[Repeated]:
        """Those to send now, in the order in which they were added."""
        for repeated in list(self._table.values()):
            if repeated.due <= now:
                heard = self._last_heard_at(repeated.peer.address) or 0.0
                silent_for = now - max(heard, repeated.since)
                repeated.due = now + max(repeated.every, min(silent_for / 2, SLOWEST_S))
                yield repeated
