"""`python -m tests.fuzz.watched ROLE ...`: a process that measures itself, in memory that a test shares."""

import asyncio
import ctypes
import gc
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cli.main import main as run_command
from control.plane import ControlPlane
from decode_node.node import DecodeNode
from prefill_node.endpoint import PrefillEndpoint
from transfer import fencing

MODULE = "tests.fuzz.watched"
ENVIRONMENT = "HISPARSE_PD_FUZZ_MEASURES"
_SLOWEST, _OBJECTS = 0, 1
_LANDED_CAN_WAIT_S = 1.0
"""Every other batch of messages has landed bytes that linger, and is waited for."""


class Measures:
    """slowest: the longest processor time in seconds of one callback of the event loop, one turn of a node's loop or
    one message at a node's control port, since it was set to 0.

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


def _timed(run: Callable[..., Any], measures: Measures) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return run(*arguments)
        finally:
            measures.slowest = max(measures.slowest, time.thread_time() - began)

    return timed


def main(words: Sequence[str]) -> None:
    measures = Measures(Path(os.environ[ENVIRONMENT]))
    fencing.LANDED_CAN_WAIT_S = _LANDED_CAN_WAIT_S
    timed = {"decode": [(DecodeNode, "_turn"), (ControlPlane, "_receive")]}
    timed["prefill"] = [(PrefillEndpoint, "_turn"), (ControlPlane, "_receive")]
    for owner, name in timed.get(words[0], [(asyncio.Handle, "_run")]):
        setattr(owner, name, _timed(getattr(owner, name), measures))

    def collect(*_: object) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        measures.objects = len(gc.get_objects())

    signal.signal(signal.SIGUSR1, collect)
    run_command(list(words))


if __name__ == "__main__":
    main(sys.argv[1:])
