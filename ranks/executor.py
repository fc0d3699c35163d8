"""Has the workers of all ranks of a node do what rank 0 orders, and collects what they report.

Rank 0's worker is in the process of the caller. The others get their orders over lines, in small loops of their own.
A node of one process is a group without others: nothing above knows how many ranks there are, but by `world_size`.
"""

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ranks.barrier import GroupFailed
from ranks.group import Ranks

OrderT = TypeVar("OrderT")
OrderT_contra = TypeVar("OrderT_contra", contravariant=True)
ReportT = TypeVar("ReportT")


class Worker(Protocol[OrderT_contra]):
    """Does what it is ordered, on threads of its own."""

    def take(self, order: OrderT_contra) -> None:
        """Begin with an order. Never waits."""
        ...

    def close(self, timeout: float) -> bool:
        """End once what was ordered has ended. Whether it has within so many seconds."""
        ...


class Line(Protocol[OrderT_contra]):
    """Takes orders to the worker of another rank."""

    def send(self, item: OrderT_contra, /) -> None: ...


class Reports(Generic[ReportT]):
    """What workers have reported. Any thread may add to it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called, on any thread, when there is a report."""
        self._wake = wake
        self._queue: queue.SimpleQueue[tuple[int, ReportT]] = queue.SimpleQueue()

    def add(self, rank: int, report: ReportT) -> None:
        self._queue.put((rank, report))
        self._wake()

    def take(self) -> Iterator[tuple[int, ReportT]]:
        """What has come, one after the other. What is not taken stays."""
        while not self._queue.empty():
            yield self._queue.get()


class Executor(Generic[OrderT, ReportT]):
    """The workers of all ranks, for the loop of rank 0."""

    def __init__(
        self,
        ranks: Ranks,
        worker: Worker[OrderT],
        lines: Sequence[Line[OrderT]],
        reports: Reports[ReportT],
    ) -> None:
        """worker: of rank 0. lines: to the workers of the other ranks, in their order."""
        self._ranks = ranks
        self._worker = worker
        self._lines = lines
        self._reports = reports
        self._has_failed = False

    @property
    def world_size(self) -> int:
        return 1 + len(self._lines)

    def order(self, rank: int, order: OrderT) -> None:
        """Have one rank do something."""
        if rank:
            self._lines[rank - 1].send(order)
        else:
            self._worker.take(order)

    def order_all(self, order: OrderT) -> None:
        for rank in reversed(range(self.world_size)):
            self.order(rank, order)

    def poll(self) -> Iterator[tuple[int, ReportT]]:
        """What ranks have reported, each with its rank. Raises GroupFailed, once, if a rank has ended."""
        if not self._has_failed:
            try:
                self._ranks.check()
            except GroupFailed:
                self._has_failed = True
                raise
        return self._reports.take()

    def step_failed(self, error: str) -> None:
        """Rank 0 could not do its part of a step. Raises GroupFailed, once, if other ranks wait for it."""
        if self._lines and not self._has_failed:
            self._has_failed = True
            raise self._ranks.failure(RuntimeError(error))

    def leave(self, order: OrderT) -> None:
        """End the node in peace: give the last order, and wait a while for the other ranks."""
        self.order_all(order)
        self._ranks.leave()

    def close(self, timeout: float) -> bool:
        """End rank 0's worker. Whether all that it was ordered to do has ended within so many seconds."""
        return self._worker.close(timeout)
