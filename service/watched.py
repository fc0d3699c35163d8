"""What was read from files, read again when they change: keys and certificates are replaced without a restart."""

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
    """The value that `read` makes of the files.

    Whoever asks for it makes the files be looked at, at most once a second. A change that cannot be read leaves the
    value as it was and is logged once: a file may be half written. Raises StartupError, as `read` does, at the start
    only.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._state = self._look()
        self._looked = time.monotonic()
        self._value = read()

    def get(self) -> T:
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            state = self._look()
            if state != self._state:
                self._state = state
                self._read_again()
        return self._value

    def _read_again(self) -> None:
        files = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except StartupError as error:
            log.error("a changed file cannot be used; what was read before stays in force", reason=str(error))
        else:
            log.info("read again after a change", files=files)

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_version(path) for path in self._paths]


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
