"""A process: what it needs before it starts, and its phases: serving, draining, ending."""

import math
import os
import resource
import signal
import time

import structlog

from base.phase import Phase

log = structlog.get_logger(__name__)

DRAIN_TIMEOUT_S = 30.0
"""Enough for a prompt and an answer of ordinary length; longer answers need more."""
_OPEN_FILES = 1 << 16
"""Some systems allow a billion, and code that closes or scans all descriptors would take minutes."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Lifecycle:
    """The phase of one process. The first SIGTERM drains; SIGINT (Ctrl-C) and any second signal end it at once.

    The deadline is the whole state, so any thread may read the phase and a signal handler may change it.
    """

    def __init__(self, drain_timeout: float) -> None:
        """drain_timeout: seconds that draining may take; 0 ends at once."""
        self._drain_timeout = drain_timeout
        self._deadline: float | None = None
        """When draining is over (time.monotonic); None while serving."""

    @property
    def phase(self) -> Phase:
        deadline = self._deadline
        if deadline is None:
            return Phase.SERVING
        return Phase.DRAINING if time.monotonic() < deadline else Phase.ENDING

    @property
    def serving(self) -> bool:
        return self._deadline is None

    def drain(self) -> None:
        """Take no new request."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._drain_timeout

    def end(self) -> None:
        """Give up the requests that are left."""
        self._deadline = -math.inf

    def follow(self, phase: Phase) -> None:
        """Go on to the phase of the group, if that is a later one."""
        if phase > self.phase:
            log.info("stopping with the other ranks", phase=phase.name.lower())
        if phase is Phase.ENDING:
            self.end()
        elif phase is Phase.DRAINING:
            self.drain()

    def signalled(self, number: int) -> None:
        if number == signal.SIGTERM and self.serving:
            self.drain()
        else:
            self.end()


def end_on_sigterm_until_served() -> None:
    """Let SIGTERM end a starting process that is process 1 of a container.

    The kernel delivers process 1 no signal that lacks a handler. Other processes keep the kernel's default, which does
    not wait for Python.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, 65536 at most. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _OPEN_FILES if soft == resource.RLIM_INFINITY else soft
