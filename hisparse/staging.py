"""Requests whose prompt was computed on this node and is being copied from device pages to the host tier."""

from dataclasses import dataclass

from hisparse.copy_stream import CopyEvent, CopyStream
from hisparse.swap_in import StagedKV, SwapInBackend
from kvcache.extents import HostSlots


@dataclass(frozen=True, eq=False)
class _Staging:
    request_id: str
    staged: StagedKV
    host_slots: HostSlots
    event: CopyEvent


@dataclass(frozen=True)
class Staged:
    """Requests whose copy is complete, and those whose copy failed, each with its error."""

    landed: list[str]
    failed: dict[str, Exception]


class StagingArea:
    """Owns the pages and host slots that a copy may touch, and releases them exactly once.

    A copy is never interrupted: an aborted request keeps its pages and slots until then. Its id is free at once.
    """

    def __init__(self, backend: SwapInBackend, stream: CopyStream) -> None:
        self._backend = backend
        self._stream = stream
        self._staging: dict[str, _Staging] = {}
        self._aborted: list[_Staging] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._staging

    def __len__(self) -> int:
        """Requests that hold pages and host slots here, aborted ones included."""
        return len(self._staging) + len(self._aborted)

    @property
    def aborted_slots(self) -> int:
        """Host slots of aborted requests, which become free when their copies are over."""
        return sum(len(entry.host_slots) for entry in self._aborted)

    def start(self, request_id: str, host_slots: HostSlots, staged: StagedKV, num_tokens: int, first: int) -> None:
        """Start the copy of positions [first, num_tokens); the area owns host slots and pages from here on."""
        slots = host_slots.slots()[first:num_tokens]
        event = self._stream.submit(lambda: self._backend.stage(staged, slots))
        self._staging[request_id] = _Staging(request_id, staged, host_slots, event)

    def abort(self, request_id: str) -> bool:
        """See `HiSparseCoordinator.abort_staging_request`."""
        entry = self._staging.pop(request_id, None)
        if entry is None:
            return False
        self._aborted.append(entry)
        self._release_aborted()
        return True

    def poll(self) -> Staged:
        """See `HiSparseCoordinator.poll_staging`."""
        self._release_aborted()
        staged = Staged([], {})
        for entry in [entry for entry in self._staging.values() if entry.event.done()]:
            try:
                entry.event.result()
            except Exception as error:
                self.abort(entry.request_id)
                staged.failed[entry.request_id] = error
            else:
                del self._staging[entry.request_id]
                entry.staged.release()
                staged.landed.append(entry.request_id)
        return staged

    def _release_aborted(self) -> None:
        over = [entry for entry in self._aborted if entry.event.done()]
        self._aborted = [entry for entry in self._aborted if entry not in over]
        for entry in over:
            entry.staged.release()
            self._backend.host.release(entry.host_slots)
