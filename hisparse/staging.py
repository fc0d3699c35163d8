"""Requests whose prompt was computed on this node and is copied from device pages to the host tier.

Copies run in order, in parallel to the step loop, on a `CopyStream`. A `CopyEvent` is the end of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hisparse.swap_in import StagedKV, SwapInBackend
from kvcache.extents import HostSlots


class CopyEvent(Protocol):
    """The end of one submitted copy; a `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether the copy is over and touches no memory any more. It may have failed."""

    def result(self) -> None:
        """Block until the copy is over, and raise what it raised."""


class CopyStream(Protocol):
    """Runs copies one after the other; a `ThreadPoolExecutor` of one thread is one."""

    def submit(self, copy: Callable[[], None], /) -> CopyEvent:
        """Queue a copy and return at once."""

    def shutdown(self) -> None:
        """Finish what is queued and stop."""


class CudaCopyEvent:
    """A CopyEvent recorded after a copy. error: why the copy, or a part of it, was not queued."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> None:
        self._event.synchronize()
        if self._error is not None:
            raise self._error


class CudaCopyStream:
    """A CopyStream of one CUDA stream.

    On the device, a copy waits for what its caller's stream was given before: kernels there write the pages that it
    reads. The caller's stream does not wait for the copy: ask its event before reusing what it touches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, copy: Callable[[], None], /) -> CudaCopyEvent:
        """Queue a copy: `copy` is called at once and must not wait for the device."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        error = None
        with torch.cuda.stream(self._stream):
            try:
                copy()
            except Exception as raised:  # `result` raises it
                error = raised
            return CudaCopyEvent(error)

    def shutdown(self) -> None:
        self._stream.synchronize()


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
        """Give up a request: its pages and host slots are released after its copy. False if it is not in staging."""
        entry = self._staging.pop(request_id, None)
        if entry is None:
            return False
        self._aborted.append(entry)
        self._release_aborted()
        return True

    def poll(self) -> Staged:
        """Requests whose prompt is on the host now, and those whose copy failed. Call it in every turn of the loop.

        The caller owns the host slots of the former again; the latter hold nothing.
        """
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
