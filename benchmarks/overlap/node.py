"""A decode node that notes what its device and its loop do: `python -m benchmarks.overlap.node RECORDS decode FLAG...`.

Once its batch has stood still for some turns, it takes the times of the next ones, then those of every kernel in as
many more, and appends a line to the file RECORDS.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from decode_node.node import DecodeNode
from decode_node.scheduler import Scheduler

STEADY_TURNS = 20
STEPS = 50
_WARM_UP = 3
"""Turns after the profiler has begun that do not count: its beginning takes time."""
LONG_GAP_US = 10.0
"""Between two kernels of a recorded step there is less; more than this, and the device waited for the host."""


@dataclass(frozen=True)
class Record:
    """What the steps of one batch size took.

    step_ms: from one step to the next, without the profiler; profiled_step_ms: with it. host_ms: processor time of the
    loop's thread in a turn. idle: part of the time in which no kernel ran; waiting: in which none ran for longer than
    LONG_GAP_US. kernels: in a step.
    """

    batch: int
    step_ms: float
    profiled_step_ms: float
    host_ms: float
    idle: float
    waiting: float
    kernels: int


class Recorder:
    """Stands between the loop and its turns. Writes one record for each batch size that stands still."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recorded: set[int] = set()
        self._batch = 0
        self._steady = 0
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.cuda.synchronize()  # steps that were recorded before the profiler's first use are opaque to it

    def turn(self, scheduler: Scheduler, turn: Callable[[], None]) -> None:
        """Take one turn, or record many."""
        turn()
        running = scheduler._coordinator.num_running
        still = running == self._batch and running == len(scheduler.requests)
        self._steady = self._steady + 1 if still else 0
        self._batch = running
        if running and self._steady >= STEADY_TURNS and running not in self._recorded:
            self._recorded.add(running)
            record = self._record(turn)
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")

    def _record(self, turn: Callable[[], None]) -> Record:
        ends, host = [time.perf_counter()], [time.thread_time()]
        for _ in range(STEPS):
            turn()
            ends.append(time.perf_counter())
            host.append(time.thread_time())
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(_WARM_UP):
                turn()
            torch.cuda.synchronize()
            begun_ns = time.time_ns()
            for _ in range(STEPS):
                turn()
            torch.cuda.synchronize()
        events = profiler.profiler.kineto_results.events()
        kernels = sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in events
            if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
            and not event.name().startswith(("Memcpy", "Memset"))
            and event.start_ns() >= begun_ns
        )
        idle, waiting = gaps(kernels)
        span = kernels[-1][1] - kernels[0][0]
        return Record(
            batch=self._batch,
            step_ms=1e3 * statistics.median(b - a for a, b in pairwise(ends)),
            profiled_step_ms=span / STEPS / 1e6,
            host_ms=1e3 * statistics.median(b - a for a, b in pairwise(host)),
            idle=idle / span,
            waiting=waiting / span,
            kernels=round(len(kernels) / STEPS),
        )


def gaps(kernels: list[tuple[int, int]]) -> tuple[int, int]:
    """Nanoseconds in which no kernel ran: all, and those in gaps longer than LONG_GAP_US.

    kernels: (start, end) of each in nanoseconds, in the order of their starts.
    """
    idle = waiting = 0
    busy_until = kernels[0][0]
    for start, end in kernels:
        gap = max(0, start - busy_until)
        idle += gap
        waiting += gap if gap > LONG_GAP_US * 1e3 else 0
        busy_until = max(busy_until, end)
    return idle, waiting


def main() -> None:
    from cli.main import main as run

    recorder = Recorder(Path(sys.argv.pop(1)))
    turn = DecodeNode._turn

    def recorded_turn(node: DecodeNode) -> None:
        recorder.turn(node._scheduler, lambda: turn(node))

    DecodeNode._turn = recorded_turn  # type: ignore[method-assign, assignment]
    run()


if __name__ == "__main__":
    main()
