"""A decode node that records its steps: `python -m benchmarks.overlap.node RECORDS STEP_MS decode FLAG...`.

Once its batch has been the same for some turns, it takes the times of the next ones, then those of every kernel in as
many more, and appends a line to the file RECORDS. With a STEP_MS above 0 nothing is computed: a stub takes so many
milliseconds for a step.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import ProfilerActivity, profile

from base.device import Download
from decode_node import process
from decode_node.node import DecodeNode
from decode_node.scheduler import Scheduler
from engine.adjustments import Ban
from engine.draft_policy import StepSize
from engine.runner import Batch, Computed, LaunchedStep, ModelRunner

STEADY_TURNS = 20
STEPS = 50
_WARM_UP = 3
"""Turns after the profiler has begun that do not count: its beginning takes time."""
LONG_GAP_US = 10.0
"""Between two kernels of a recorded step there is less; more than this, and the device waited for the host."""


@dataclass(frozen=True)
class Record:
    """What the steps of one batch size took.

    step_ms: from one step to the next, without the profiler; profiled_step_ms: with it. host_ms: a turn of the loop
    without its wait for the device, median and 9th decile. idle: part of the time in which no kernel ran; waiting: in
    which none ran for longer than LONG_GAP_US. kernels: in a step. What the profiler finds is 0 with a stub.
    """

    batch: int
    step_ms: float
    host_ms: float
    host_p90_ms: float
    profiled_step_ms: float = 0.0
    idle: float = 0.0
    waiting: float = 0.0
    kernels: int = 0


class WaitClock:
    """Adds up how long the loop waits for the device."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time counts as waiting."""

        def waited(*args: Any) -> Any:
            begun = time.perf_counter()
            try:
                return wait(*args)
            finally:
                self.seconds += time.perf_counter() - begun

        return waited


class StubRunner(ModelRunner):
    """Takes a fixed time for every step and answers the same token."""

    def __init__(self, step_s: float, clock: WaitClock, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._step_s = step_s
        self._wait = clock.timed(time.sleep)
        self._over_at = 0.0

    def launch(self, batch: Batch, padded: int | None = None) -> LaunchedStep:
        return LaunchedStep(batch, torch.empty(0), padded or len(batch))

    def pad(self, size: StepSize) -> None:
        pass

    def sample(
        self,
        step: LaunchedStep,
        keys: npt.NDArray[np.int64],
        bans: Sequence[Ban] = (),
        masks: torch.Tensor | None = None,
        ended: Sequence[int] = (),
    ) -> None:
        self._over_at = max(self._over_at, time.perf_counter()) + self._step_s

    def draft(self, step: LaunchedStep) -> bool:
        return True

    def collect(self, step: LaunchedStep) -> list[Computed]:
        self._wait(max(0.0, self._over_at - time.perf_counter()))
        batch, width = step.batch, step.batch.places.width
        self._coordinator.step_over(batch.places, dict.fromkeys(batch.request_ids, width))
        return [Computed((5,) * width, width, (5,) * (width - 1))] * len(batch)


class Recorder:
    """Stands between the loop and its turns. Writes one record for each batch size that stands still.

    kernels: whether to record the times of kernels, too; needs a CUDA device.
    """

    def __init__(self, path: Path, clock: WaitClock, kernels: bool) -> None:
        self._path = path
        self._clock = clock
        self._kernels = kernels
        self._recorded: set[int] = set()
        self._batch = 0
        self._steady = 0
        if kernels:
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
        ends, waits = [time.perf_counter()], [self._clock.seconds]
        for _ in range(STEPS):
            turn()
            ends.append(time.perf_counter())
            waits.append(self._clock.seconds)
        turns = [after - before for before, after in pairwise(ends)]
        waited = [after - before for before, after in pairwise(waits)]
        host = [took - wait for took, wait in zip(turns, waited, strict=True)]
        record = Record(
            batch=self._batch,
            step_ms=1e3 * statistics.median(turns),
            host_ms=1e3 * statistics.median(host),
            host_p90_ms=1e3 * statistics.quantiles(host, n=10)[-1],
        )
        return self._profiled(record, turn) if self._kernels else record

    def _profiled(self, record: Record, turn: Callable[[], None]) -> Record:
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
        return replace(
            record,
            profiled_step_ms=span / STEPS / 1e6,
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

    records, step_ms = Path(sys.argv.pop(1)), float(sys.argv.pop(1))
    clock = WaitClock()
    Download.wait = clock.timed(Download.wait)  # type: ignore[method-assign]
    if step_ms > 0:
        process.ModelRunner = partial(StubRunner, step_ms / 1e3, clock)  # type: ignore[assignment, attr-defined]
    recorder = Recorder(records, clock, kernels=step_ms == 0 and torch.cuda.is_available())
    turn = DecodeNode._turn

    def recorded_turn(node: DecodeNode) -> None:
        recorder.turn(node._scheduler, lambda: turn(node))

    DecodeNode._turn = recorded_turn  # type: ignore[method-assign, assignment]
    run()


if __name__ == "__main__":
    main()
