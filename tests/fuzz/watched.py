"""`python -m tests.fuzz.watched_gateway gateway ...`: a gateway that measures itself, in memory that a test shares."""

import asyncio
import ctypes
import gc
import mmap
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cli.main import main as run_command

MODULE = "tests.fuzz.watched_gateway"
ENVIRONMENT = "HISPARSE_PD_FUZZ_MEASURES"
_SLOWEST, _OBJECTS = 0, 1


class Measures:
    """slowest: the longest processor time in seconds of one callback of the event loop, since it was set to 0.

    objects: that Python's garbage collector knows, since the last SIGUSR1; 0 until it is answered.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), 16)).cast("d")

    @property
    def slowest(self) -> float:
        return self._values[_SLOWEST]

    @slowest.setter
    def slowest(self, seconds: float) -> None:
        self._values[_SLOWEST] = seconds

    @property
    def objects(self) -> int:
        return int(self._values[_OBJECTS])

    @objects.setter
    def objects(self, count: int) -> None:
        self._values[_OBJECTS] = count


def main(words: Sequence[str]) -> None:
    measures = Measures(Path(os.environ[ENVIRONMENT]))
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        measures.slowest = max(measures.slowest, time.thread_time() - began)

    def collect(*_: object) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        measures.objects = len(gc.get_objects())

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, collect)
    run_command(list(words))


if __name__ == "__main__":
    main(sys.argv[1:])
