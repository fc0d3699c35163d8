"""How much an action does, whatever the machine is and is busy with."""

import gc
import statistics
import sys
import time
from collections.abc import Callable

_REFERENCE_S = 0.0075
"""Of `_reference_work`: half of what an idle core of 2.4 GHz takes. On such cores all tests take twice as long as
where bounds of processor time were chosen, and that work three times as long if the core's other thread computes, too.
"""


def calls_of(action: Callable[[], object]) -> int:
    """How many functions it calls, and how often it resumes generators. Nothing of the garbage collector counts."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def slowness() -> float:
    """How many times as long a processor takes now as where the bounds of processor time were chosen; at least 1."""
    return max(1.0, statistics.median(_reference_work() for _ in range(7)) / _REFERENCE_S)


def _reference_work() -> float:
    """Seconds of a processor for some Python objects."""
    began = time.thread_time()
    objects = {str(number): [number, (number,)] for number in range(20_000)}
    sorted(objects)
    return time.thread_time() - began
