"""Decides which rows are resident: the policy of docs/residency.md, over `RowFiller` and `DeviceKVPool`."""

from collections.abc import Collection
from dataclasses import dataclass

import structlog

from hisparse.filling import FillEnd, RowFiller
from hisparse.staging import CopyStream
from hisparse.swap_in import SwapInBackend
from kvcache.extents import HostSlots

log = structlog.get_logger(__name__)

_CALM_STEPS = 256
"""After slots were short, no fill begins for that many steps."""
_FETCHED = 256
"""About as many positions of a long row are fetched in each step. A fill has to save more than it copies."""


@dataclass(eq=False)
class RunningRequest:
    """num_tokens: tokens whose KV is on the host, by the steps that were read. unread: tokens that other steps, which
    were begun, give it at most. room: for how many tokens it has host slots, index pages and hot slots. limit: tokens
    that it may ever have there."""

    row: int
    host_slots: HostSlots
    num_tokens: int
    limit: int
    room: int
    unread: int = 0

    @property
    def reached(self) -> int:
        """How many tokens it has at most when the steps that were begun are over."""
        return self.num_tokens + self.unread

    @property
    def end(self) -> int:
        """The position before which its next step may compute tokens."""
        return min(self.room, self.limit)


class ResidentRows:
    """Fills the shortest long row while hot slots are free; makes the longest resident row long when they are short.

    A resident row has a hot slot for every position. A row that ceases to be resident keeps those of its newest tokens,
    as many as a hot buffer has: so the fewest rows are affected, and none waits for the device. step: the number of the
    last step that was begun. shrunk: rows that have ceased to be resident.
    """

    def __init__(
        self,
        backend: SwapInBackend,
        copy_stream: CopyStream,
        running: Collection[RunningRequest],
        enabled: bool,
    ) -> None:
        """running: the requests of the coordinator, at any time."""
        self.enabled = enabled
        self.filler = RowFiller(backend, copy_stream)
        self.shrunk = 0
        self._device = backend.device
        self._residency = backend.residency
        self._running = running
        self._calm_until = 0
        """The step from which on a fill may begin."""

    def fill(self, step: int) -> None:
        """Go on with the fill of a row, or begin one."""
        self.filler.poll()
        if self.filler.is_idle and self.enabled and step >= self._calm_until:
            self._start()
        request = next((request for request in self._running if request.row == self.filler.row), None)
        if request is None:
            return
        try:
            filled = self.filler.advance(request.host_slots, request.num_tokens, request.reached)
        except Exception as error:
            log.error("a row cannot be made resident", row=request.row, error=str(error))
            filled = False
        if filled:
            request.room = min(len(request.host_slots), self._device.room(request.row))
        elif self.filler.row is None:
            # It failed, or the row has outgrown it: the next one might do the same.
            self._keep_calm(step)

    def reclaim(self, step: int) -> bool:
        """Make the row long that gives back most slots. False if none gives any.

        A long row costs misses however long it is. Slots of a row that is being filled come back later.
        """
        self._keep_calm(step)
        largest = max(self._running, key=lambda request: self._device.spare(request.row), default=None)
        if largest is None or not self._device.spare(largest.row):
            self.filler.abandon(FillEnd.RECLAIMED)
            return False
        self.make_long(largest)
        return True

    def make_long(self, request: RunningRequest) -> None:
        """Leave a resident row a hot buffer."""
        self.shrunk += 1
        first = self._device.make_long(request.row, request.num_tokens)
        # What lies beyond is being computed, or was drafted.
        self._residency.reset_range(request.row, first, request.num_tokens)

    def leave(self, row: int) -> None:
        """A row is about to be freed."""
        if self.filler.row == row:
            self.filler.abandon(FillEnd.LEFT)

    def _start(self) -> None:
        """Begin to fill the shortest row that is worth it, if enough slots stay free for rows that grow and for the
        next request."""
        device = self._device
        rows = [
            request
            for request in self._running
            if not device.is_resident(request.row)
            and _FETCHED * (request.limit - request.num_tokens) >= request.num_tokens
        ]
        if not rows:
            return
        shortest = min(rows, key=lambda request: request.num_tokens)
        if device.can_take(self.filler.slabs_for(shortest.num_tokens), shortest.num_tokens):
            self.filler.start(shortest.row, shortest.num_tokens)

    def _keep_calm(self, step: int) -> None:
        self._calm_until = step + _CALM_STEPS
