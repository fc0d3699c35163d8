"""What rank 0 and another rank tell each other beside collectives: objects, in order, over a descriptor.

Objects are pickled, so no other process may take part. On one host a line is a pair of sockets that the ranks inherit;
between hosts, a connection of which both ends have shown that they know the cluster's key (`ranks/rendezvous.py`).
"""

import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ranks.place import RankPlace


class RankLine:
    """One end. Sending never waits: the other rank may be stopped. What was sent comes as long as both ranks live.

    receive: called with each object, in order, on a thread of the line.
    """

    def __init__(self, descriptor: int, receive: Callable[[Any], None]) -> None:
        self._connection = Connection(descriptor)
        self._receive = receive
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for work in (self._write, self._read):
            threading.Thread(target=work, name="rank-line", daemon=True).start()

    def send(self, item: object) -> None:
        """Any thread may call it. The object must not change any more."""
        self._outbox.put(item)

    def _write(self) -> None:
        try:
            while True:
                self._connection.send(self._outbox.get())
        except OSError:
            return  # The other rank has ended, which the rank's watch says.

    def _read(self) -> None:
        try:
            while True:
                self._receive(self._connection.recv())
        except (EOFError, OSError):
            return


def lines_to_others(place: RankPlace, receive: Callable[[int, Any], None]) -> list[RankLine]:
    """Rank 0's lines, in the order of the other ranks. receive: is told the rank, too."""

    def from_rank(rank: int) -> Callable[[Any], None]:
        return lambda item: receive(rank, item)

    return [RankLine(first, from_rank(rank)) for rank, (first, _) in enumerate(place.lines, start=1)]


def line_to_first(place: RankPlace, receive: Callable[[Any], None]) -> RankLine:
    """The line of a rank other than 0."""
    return RankLine(place.lines[place.rank - 1][1], receive)
