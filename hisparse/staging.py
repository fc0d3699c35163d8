"""Requests whose prompt was computed on this node and is on its way from device pages to the host tier."""

from dataclasses import dataclass

import torch

from hisparse.copy_stream import CopyEvent, CopyStream
from hisparse.extents import HostSlots
from hisparse.host_pool import HostKVPool
from hisparse.lifecycle import TierState, move
from hisparse.swap_in import StagedKV, SwapInBackend


@dataclass(eq=False)
class _Staging:
    request_id: str
    state: TierState
    staged: StagedKV
    host_slots: HostSlots
    event: CopyEvent


@dataclass(frozen=True)
class Staged:
    """Requests whose copy is complete, and those whose copy failed, each with its error."""

    landed: list[str]
    failed: dict[str, Exception]


class StagingArea:
    """Owns pages and host slots while a copy may touch them, and lets go of each exactly once.

    A copy that was started is never interrupted: an aborted request is kept aside until its copy is over. Its id is
    free for another request at once.
    """

    def __init__(self, host: HostKVPool, backend: SwapInBackend, stream: CopyStream) -> None:
        self._host = host
        self._backend = backend
        self._stream = stream
        self._staging: dict[str, _Staging] = {}
        self._aborting: list[_Staging] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._staging

    def __len__(self) -> int:
        """Requests that hold pages and host slots here, aborted ones included."""
        return len(self._staging) + len(self._aborting)

    @property
    def aborting_slots(self) -> int:
        """Host slots that become free when a copy is over that nobody wants any more."""
        return sum(len(entry.host_slots) for entry in self._aborting)

    def start(self, request_id: str, host_slots: HostSlots, staged: StagedKV, num_tokens: int) -> None:
        """Start the copy and take over host slots and pages."""
        slots = torch.from_numpy(host_slots.slots()[:num_tokens])
        event = self._stream.submit(lambda: self._backend.stage(staged, slots))
        state = move(request_id, TierState.NEW, TierState.STAGING)
        self._staging[request_id] = _Staging(request_id, state, staged, host_slots, event)

    def abort(self, request_id: str) -> bool:
        """Give up a request; what it holds is released as soon as its copy is over. False if it is not here."""
        entry = self._staging.pop(request_id, None)
        if entry is None:
            return False
        entry.state = move(request_id, entry.state, TierState.ABORTING)
        self._aborting.append(entry)
        self._collect_aborted()
        return True

    def poll(self) -> Staged:
        """The requests whose copy is over. Those that are complete have their host slots back, their pages are free.

        Those whose copy failed hold nothing any more.
        """
        self._collect_aborted()
        staged = Staged([], {})
        for entry in [entry for entry in self._staging.values() if entry.event.done()]:
            try:
                entry.event.wait()
            except Exception as error:
                self.abort(entry.request_id)
                staged.failed[entry.request_id] = error
            else:
                del self._staging[entry.request_id]
                entry.state = move(entry.request_id, entry.state, TierState.GONE)
                entry.staged.release()
                staged.landed.append(entry.request_id)
        return staged

    def _collect_aborted(self) -> None:
        over = [entry for entry in self._aborting if entry.event.done()]
        self._aborting = [entry for entry in self._aborting if entry not in over]
        for entry in over:
            entry.state = move(entry.request_id, entry.state, TierState.GONE)
            entry.staged.release()
            self._host.release(entry.host_slots)
