"""Copies that run beside the step loop, in order, and events that say when they are over."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol


class CopyEvent(Protocol):
    """The end of one submitted copy."""

    def done(self) -> bool:
        """Whether the copy is over: it touches no memory any more. It may have failed."""
        ...

    def wait(self) -> None:
        """Block until the copy is over, and raise what it raised."""
        ...


class CopyStream(Protocol):
    """Runs copies one after the other, beside its caller."""

    def submit(self, copy: Callable[[], None]) -> CopyEvent:
        """Queue a copy and return at once."""
        ...

    def close(self) -> None:
        """Finish what is queued and stop."""
        ...


class CpuCopyEvent:
    """A CopyEvent set by the worker thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the worker."""
        self._error = error
        self._over.set()


class CpuCopyStream:
    """A CopyStream of one worker thread. Its caller and the worker talk through a queue and through events."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], CpuCopyEvent] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="hisparse-copy", daemon=True)
        self._worker.start()

    def submit(self, copy: Callable[[], None]) -> CpuCopyEvent:
        event = CpuCopyEvent()
        self._queue.put((copy, event))
        return event

    def close(self) -> None:
        self._queue.put(None)
        self._worker.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            copy, event = job
            try:
                copy()
            except BaseException as error:  # whatever it is, it belongs to whoever waits for the event
                event.finish(error)
            else:
                event.finish(None)
