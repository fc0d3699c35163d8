"""Copies that run in order beside the step loop, and events that say when each is over."""

from collections.abc import Callable
from typing import Protocol


class CopyEvent(Protocol):
    """The end of one submitted copy; a `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether the copy is over and touches no memory any more. It may have failed."""

    def result(self) -> None:
        """Block until the copy is over, and raise what it raised."""


class CopyStream(Protocol):
    """Runs copies one after the other, beside its caller; a `ThreadPoolExecutor` of one thread is one."""

    def submit(self, copy: Callable[[], None], /) -> CopyEvent:
        """Queue a copy and return at once."""

    def shutdown(self) -> None:
        """Finish what is queued and stop."""
