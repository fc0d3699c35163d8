"""Shows how far the loading of weights is: a bar on a terminal, a line for every tenth in a log."""

import sys
import time
from threading import Lock

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from base.memory import human

log = structlog.get_logger(__name__)

_LEAST_BYTES = 1 << 30
"""Less is loaded before anybody reads a line about it."""


class LoadProgress:
    """Any thread may call `advance`. `_lock` guards the count."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._total = self._done = 0
        self._begun = 0.0
        self._lock = Lock()
        self._bar: Bar | None = None

    def begin(self, num_bytes: int) -> None:
        """So many bytes will be read."""
        self._total, self._begun = num_bytes, time.monotonic()
        if sys.stderr.isatty():
            columns = (TextColumn(self._what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=num_bytes)
            self._bar.start()

    def advance(self, num_bytes: int) -> None:
        """So many bytes more have been read."""
        with self._lock:
            tenths = 10 * self._done // max(1, self._total)
            self._done += num_bytes
            now = 10 * self._done // max(1, self._total)
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], num_bytes)
        elif tenths < now < 10 and self._total >= _LEAST_BYTES:
            log.info(self._what, done=f"{10 * now}%", of=human(self._total))

    def end(self) -> None:
        """All has been read, or reading has failed."""
        if self._bar is not None:
            self._bar.stop()
        seconds = time.monotonic() - self._begun
        log.info(
            f"{self._what}: done" if self._done == self._total else f"{self._what}: given up",
            read=human(self._done),
            seconds=round(seconds, 1),
            rate=f"{human(int(self._done / max(seconds, 1e-6)))}/s",
        )
