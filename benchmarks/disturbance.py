"""Whether a measurement had the machine to itself."""

import os
import resource
import time
from pathlib import Path

_NOTABLE = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Disturbance:
    """Counts the processor time that processes other than this one and its children take from now on.

    Children count once they have been waited for.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._machine = _machine_seconds()
        self._own = _own_seconds()

    def cores(self) -> float:
        """Cores that others kept busy since the start, on average; at least 0."""
        others = (_machine_seconds() - self._machine) - (_own_seconds() - self._own)
        return max(0.0, others / max(1e-9, time.monotonic() - self._started))


def warning(cores: float) -> str | None:
    """What to say of others that kept so many cores busy, or None if it was next to nothing."""
    if cores < _NOTABLE:
        return None
    return f"other processes kept {cores:.1f} cores busy meanwhile: measure again on a machine that is idle"


def _machine_seconds() -> float:
    """Processor time that was spent on anything since the machine started, idling and waiting for disks left out."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def _own_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
