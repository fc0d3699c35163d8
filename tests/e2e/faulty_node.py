"""`python -m tests.e2e.faulty_node prefill|decode|gateway ...`: a process of the service that meets with faults.

Product code knows nothing of faults. This module wraps a few of its methods and then runs the ordinary command:
control messages are lost or late, writes are slow or spoilt, and everything that lands is written down for an audit.
Faults that come and go are switched by files (`Switches`), so that a process need not be asked.
"""

import ctypes
import heapq
import itertools
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from base.device import DeviceFailed
from cli.main import main as run_command
from control import connections
from control.messages import Destination
from control.plane import ControlPlane
from engine import runner
from prefill_node import lanes
from tests.e2e import chaos_audit
from transfer.planner import Descriptors
from transfer.transports import Transports
from transfer.writer import BATCHES_IN_FLIGHT, Channel, Outcome, Pending

MODULE = "tests.e2e.faulty_node"
_ENVIRONMENT = "HISPARSE_PD_FAULTS"
_RELEASE_S = 0.05


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a process. `directory` has its switches, and the files that it writes.

    drop, delay: shares of the control messages; a late one comes within `delay_s` seconds. slow: share of the batches
    that are under way for long: they land `slow_s` seconds (least, most) after they were posted.
    """

    directory: str
    name: str
    seed: int = 0
    drop: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.5
    slow: float = 0.0
    slow_s: tuple[float, float] = (0.0, 0.0)
    journal: bool = False
    """Write down every batch that is posted."""
    idle_close_s: float | None = None
    """After how long unused connections to other processes' mailboxes are closed; None: as usual."""
    watch_s: float | None = None
    """For how long a prefill node goes on pinging a decode node that it wrote to; None: as usual."""

    def environment(self) -> dict[str, str]:
        return {_ENVIRONMENT: json.dumps(vars(self))}

    @staticmethod
    def of_this_process() -> "Faults":
        return Faults(**json.loads(os.environ[_ENVIRONMENT]))


class Switches:
    """Files whose presence means something to the processes whose `Faults` name this directory."""

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        self.chaos = directory / "chaos"
        """Messages are lost and late, and writes are slow, as far as `Faults` says so."""
        self._directory = directory

    def deaf(self, name: str) -> Path:
        """That process hears nobody, as behind a partition; what it says is heard."""
        return self._directory / f"{name}.deaf"

    def cut_off(self, name: str) -> Path:
        """That process hears nobody, and is heard when the file is gone: a partition, without the data network."""
        return self._directory / f"{name}.cut-off"

    def failed_device(self, name: str) -> Path:
        """The device of that decode node fails at everything, as CUDA does after an illegal access."""
        return self._directory / f"{name}.failed-device"

    def spoil(self, name: str) -> Path:
        """That process spoils one byte of its next write, and takes the file away."""
        return self._directory / f"{name}.spoil"

    def spoil_read(self, name: str) -> Path:
        """Likewise, one byte of what it reads next."""
        return self._directory / f"{name}.spoil-read"


class UnreliableControl:
    """Loses some of the frames that arrive and lets others arrive late, so that they overtake each other."""

    def __init__(self, faults: Faults) -> None:
        switches = Switches(faults.directory)
        self._faults = faults
        self._chaos, self._deaf = switches.chaos, switches.deaf(faults.name)
        self._cut_off = switches.cut_off(faults.name)
        self._rng = random.Random(f"{faults.seed} {faults.name} control")
        self._late: list[tuple[float, int, zmq.Frame]] = []
        self._number = itertools.count()
        self._unsent: deque[Callable[[], None]] = deque()

    def install(self) -> None:
        receive, send, start = ControlPlane._receive, ControlPlane._send, ControlPlane.start

        def unreliable_receive(plane: ControlPlane, frame: zmq.Frame) -> None:
            if self._arrives(frame):
                receive(plane, frame)

        def unreliable_send(plane: ControlPlane, *arguments: Any, **options: Any) -> None:
            self._unsent.append(partial(send, plane, *arguments, **options))
            send_unsent()

        def send_unsent() -> None:
            while self._unsent and not self._cut_off.exists():
                self._unsent.popleft()()

        def release(plane: ControlPlane) -> None:
            send_unsent()
            while self._late and self._late[0][0] <= time.monotonic():
                receive(plane, heapq.heappop(self._late)[-1])

        def start_releasing(plane: ControlPlane) -> None:
            start(plane)
            plane.periodically(_RELEASE_S, lambda: release(plane))

        ControlPlane._receive = unreliable_receive  # type: ignore[method-assign]
        ControlPlane._send = unreliable_send  # type: ignore[method-assign]
        ControlPlane.start = start_releasing  # type: ignore[method-assign]

    def _arrives(self, frame: zmq.Frame) -> bool:
        """Whether a frame arrives now; otherwise it is late, or lost."""
        if self._deaf.exists() or self._cut_off.exists():
            return False
        if not self._chaos.exists():
            return True
        chance = self._rng.random() - self._faults.drop
        if 0 <= chance < self._faults.delay:
            due = time.monotonic() + self._rng.uniform(0, self._faults.delay_s)
            heapq.heappush(self._late, (due, next(self._number), frame))
        return chance >= self._faults.delay


class FaultyChannel:
    """A channel whose batches take their time, are spoilt and written down."""

    def __init__(self, channel: Channel, destination: Destination, faults: Faults, rng: random.Random) -> None:
        switches = Switches(faults.directory)
        self._channel = channel
        self._destination = destination
        self._faults = faults
        self._rng = rng
        self._chaos, self._spoil = switches.chaos, switches.spoil(faults.name)
        self._under_way = ThreadPoolExecutor(BATCHES_IN_FLIGHT)
        self._journal = chaos_audit.Journal(journal_path(faults.directory)) if faults.journal else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def submit(self, batch: Descriptors) -> Pending:
        slow = self._chaos.exists() and self._rng.random() < self._faults.slow
        if not slow and not self._spoil.exists():
            return self._post(batch, time.monotonic())
        delay = self._rng.uniform(*self._faults.slow_s) if slow else 0.0
        return self._under_way.submit(self._carry, batch, time.monotonic(), delay).result

    def _carry(self, batch: Descriptors, posted_at: float, delay: float) -> Outcome:
        """What became of a batch that lands after a while."""
        time.sleep(delay)
        outcome = self._post(batch, posted_at)()
        if self._spoil.exists() and (wrong := _one_wrong_byte(batch)) is not None:
            with suppress(FileNotFoundError):
                self._spoil.unlink()
                outcome = max(outcome, self._channel.submit(wrong)())
        return outcome

    def _post(self, batch: Descriptors, posted_at: float) -> Pending:
        if self._journal is not None:
            self._journal.append(
                {
                    "posted_at": posted_at,
                    "at": time.monotonic(),
                    "node": self._faults.name,
                    "pool": self._destination.buffers.ptrs[0],
                }
            )
        return self._channel.submit(batch)


class FaultyReads(FaultyChannel):
    """A channel that reads, likewise; nothing is written down."""

    def __init__(self, channel: Channel, destination: Destination, faults: Faults, rng: random.Random) -> None:
        super().__init__(channel, destination, replace(faults, journal=False), rng)
        self._spoil = Switches(faults.directory).spoil_read(faults.name)

    def _carry(self, batch: Descriptors, posted_at: float, delay: float) -> Outcome:
        time.sleep(delay)
        outcome = self._post(batch, posted_at)()
        with suppress(FileNotFoundError):
            self._spoil.unlink()
            last = int(batch.destinations[-1] + batch.lengths[-1]) - 1
            ctypes.memset(last, ctypes.string_at(last, 1)[0] ^ 1, 1)
        return outcome


def _one_wrong_byte(batch: Descriptors) -> Descriptors | None:
    """A write of another byte of the source over the first one of the destination; None if all are the same."""
    source, destination, length = int(batch.sources[0]), int(batch.destinations[0]), int(batch.lengths[0])
    content = ctypes.string_at(source, length)
    other = next((at for at, byte in enumerate(content) if byte != content[0]), None)
    if other is None:
        return None
    return Descriptors(*(np.array([value], dtype=np.int64) for value in (source + other, destination, 1)))


def journal_path(directory: str | Path) -> Path:
    """Where the batches are written down that processes posted."""
    return Path(directory) / "writes.jsonl"


def _make_transfers_faulty(faults: Faults) -> None:
    connect = Transports.connect
    rng = random.Random(f"{faults.seed} {faults.name} writes")

    def faulty_connect(transports: Transports, destination: Destination, reading: bool = False) -> Channel:
        faulty = FaultyReads if reading else FaultyChannel
        return faulty(connect(transports, destination, reading), destination, faults, rng)

    Transports.connect = faulty_connect  # type: ignore[method-assign,assignment]


def _let_the_device_fail(faults: Faults) -> None:
    """Like CUDA: the error comes up where the host waits for a step, and at every wait after it."""
    failed = Switches(faults.directory).failed_device(faults.name)
    collect, check_device = runner.ModelRunner.collect, runner.check_device
    error = "CUDA error: an illegal memory access was encountered"

    def collect_if_it_works(model_runner: runner.ModelRunner, step: runner.LaunchedStep) -> list[runner.Computed]:
        if failed.exists():
            raise RuntimeError(error)
        return collect(model_runner, step)

    def check_as_on_cuda(device: torch.device) -> None:
        if failed.exists():
            raise DeviceFailed(f"{device} cannot be used any more: {error}")
        check_device(device)

    runner.ModelRunner.collect = collect_if_it_works  # type: ignore[method-assign]
    runner.check_device = check_as_on_cuda


def main(words: list[str]) -> None:
    """Run a command of `hisparse-pd` with the faults that the environment asks for."""
    faults = Faults.of_this_process()
    if faults.idle_close_s is not None:
        connections.IDLE_CLOSE_S = faults.idle_close_s
    if faults.watch_s is not None:
        lanes._WATCHED_FOR_S = faults.watch_s
    UnreliableControl(faults).install()
    audit = chaos_audit.Journal(chaos_audit.audit_path(faults.directory))
    if words[0] == "prefill":
        _make_transfers_faulty(faults)
        chaos_audit.watch_prefill(audit)
    elif words[0] == "decode":
        chaos_audit.watch_decode(audit)
        _let_the_device_fail(faults)
    run_command(words)


if __name__ == "__main__":
    main(sys.argv[1:])
