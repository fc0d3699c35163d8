"""Mooncake by itself: what it reaches with the descriptors that it is given."""

import time
from collections import deque
from typing import Any

from benchmarks.transfer.methods import MethodFailed
from transfer.planner import Descriptors

_DONE, _FAILED = 1, -1
_WINDOW = 128
_BATCH = 256
"""Of a synchronous call; the TCP transport refuses some 2000."""
_POLL_S = 0.0002


class RawEngine:
    """The engine by which this project sends, used without it: the same connections, the same settings."""

    def __init__(self, mooncake: Any) -> None:
        self._engine = mooncake

    def submit_and_poll(self, session: str, batch: Descriptors) -> None:
        """Submit descriptors one by one, some in flight at a time, and sleep between looks at the oldest."""
        posted: deque[int] = deque()
        for source, destination, length in zip(*(column.tolist() for column in batch), strict=True):
            if len(posted) == _WINDOW:
                self._await(posted.popleft())
            handle = self._engine.transfer_submit_write(session, source, destination, length)
            if handle <= 0:
                raise MethodFailed(f"Mooncake took no write to {session}")
            posted.append(handle)
        while posted:
            self._await(posted.popleft())

    def call_synchronously(self, session: str, batch: Descriptors) -> None:
        """Batches, each in a call that returns when it has landed."""
        sources, destinations, lengths = (column.tolist() for column in batch)
        for first in range(0, len(lengths), _BATCH):
            part = slice(first, first + _BATCH)
            if self._engine.batch_transfer_sync_write(session, sources[part], destinations[part], lengths[part]) != 0:
                raise MethodFailed(f"Mooncake failed to write a batch to {session}")

    def _await(self, handle: int) -> None:
        while (status := self._engine.transfer_check_status(handle)) != _DONE:
            if status == _FAILED:
                raise MethodFailed("Mooncake failed to write a descriptor")
            time.sleep(_POLL_S)
