"""Values read from files and read again when these change: keys and certificates are replaced without a restart."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from base.errors import StartupError

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LOOK_EVERY_S = 1.0


class WatchedFiles(Generic[T]):
    """The value that `read` makes of the files. The constructor raises StartupError if `read` does."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._versions = [_version(path) for path in paths]
        self._looked = time.monotonic()
        self._value = read()

    def get(self) -> T:
        """The value. Looks at the files at most once a second.

        If a changed file cannot be used (it may be half written), that is logged once, and the value stays.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            versions = [_version(path) for path in self._paths]
            if versions != self._versions:
                self._versions = versions
                try:
                    self._value = self._read()
                except StartupError as error:
                    log.error("a changed file cannot be used; what was read before stays in force", reason=str(error))
                else:
                    log.info("read again after a change", files=", ".join(map(str, self._paths)))
        return self._value


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
