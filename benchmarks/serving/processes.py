"""The processes of a service that was started here: their processor time, and what their nodes count."""

import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil

from benchmarks.metric_pages import Metrics, read_metrics
from benchmarks.serving.client import Endpoint

_ROLES = frozenset({"prefill", "decode"})
_CPUCLOCK_SCHED = 2
"""Of Linux's numbers for a process's clocks: that of the time it was scheduled for."""


class Counters:
    """What the nodes of a service have counted, and how much more it is later."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._urls = [] if endpoint.process_id is None else node_urls(endpoint.process_id)
        self._before = self._read()

    def grown(self) -> Metrics | None:
        """By how much each counter without labels has grown, by name without prefix, those that did not left out.

        None for a service whose nodes are not known, and if one of them did not answer.
        """
        after = self._read()
        if self._before is None or after is None:
            return None
        grown = {name: value - self._before.get(name, 0.0) for name, value in after.items()}
        return {name: value for name, value in grown.items() if value and name.endswith("_total")}

    def _read(self) -> Metrics | None:
        try:
            return read_metrics(*self._urls) if self._urls else None
        except httpx.HTTPError:
            return None


def node_urls(process_id: int) -> list[str]:
    """The addresses of the status pages of all nodes below a process, by their command lines."""
    urls = []
    for process in _tree(process_id):
        with suppress(psutil.NoSuchProcess):
            # A process that sets its title has its whole command line in one word.
            words = " ".join(process.cmdline()).split()
            if _ROLES & set(words) and "--port" in words:
                urls.append(f"http://127.0.0.1:{words[words.index('--port') + 1]}")
    return sorted(set(urls))


def processor_seconds(process_id: int) -> float:
    """Processor time of a process and all below it, those that ended left out.

    From the clocks that Linux keeps by the nanosecond; /proc/PID/stat, where psutil looks, has hundredths of a second.
    """
    return sum(_clock(process.pid) for process in _tree(process_id))


def _tree(process_id: int) -> Iterator[psutil.Process]:
    root = psutil.Process(process_id)
    yield root
    yield from root.children(recursive=True)


def _clock(process_id: int) -> float:
    """clock_getcpuclockid(3), which Python lacks, and the time; 0 for a process that has ended."""
    try:
        return time.clock_gettime(~process_id << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0
