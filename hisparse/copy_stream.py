"""Copies that run in order, in parallel to the step loop, and an event for the end of each."""

from collections.abc import Callable
from typing import Protocol

import torch


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
