"""How a process comes to its end: it serves, it drains, it ends."""

import math
import os
import signal
import time
from enum import Enum

DRAIN_TIMEOUT_S = 30.0
"""A prompt and an answer of ordinary length are through by then; whoever streams longer ones gives more."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Phase(Enum):
    """What a process does with requests. It never goes back."""

    SERVING = "serving"
    """It takes new ones."""
    DRAINING = "draining"
    """It takes none, hands over what has not begun and finishes what has, until its drain timeout."""
    ENDING = "ending"
    """It gives up what is left."""


class Lifecycle:
    """The phase of one process, driven by signals and by time.

    The first SIGTERM makes it drain. SIGINT, which is what Ctrl-C sends, and any second signal end it at once.
    The deadline is the whole state, so the phase may be read on any thread and changed in a signal handler.
    """

    def __init__(self, drain_timeout: float) -> None:
        """drain_timeout: seconds that draining may take; 0 ends at once."""
        self._drain_timeout = drain_timeout
        self._deadline: float | None = None
        """When it ends (time.monotonic); None while it serves."""

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
        """Take nothing new from now on."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._drain_timeout

    def end(self) -> None:
        """Do not wait for what is left."""
        self._deadline = -math.inf

    def signalled(self, number: int) -> None:
        """A stop signal arrived."""
        if number == signal.SIGTERM and self.serving:
            self.drain()
        else:
            self.end()


def end_on_sigterm_until_served() -> None:
    """Let SIGTERM end a process that starts, also as process 1 of a container.

    To that one the kernel delivers no signal without a handler: a pod that loads its model would outlive SIGTERM for
    its whole grace period. Others keep the kernel's own way, which waits for no line of Python.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
