"""What signals and time make of a process."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from base.phase import Phase
from service import lifecycle
from service.lifecycle import Lifecycle
from tests.skips import impossible


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lifecycle, "time", clock)
    return clock


def test_sigterm_drains_until_the_timeout(clock: Clock) -> None:
    process = Lifecycle(drain_timeout=30.0)
    assert process.phase is Phase.SERVING
    process.signalled(signal.SIGTERM)
    clock.now += 29.9
    assert process.phase is Phase.DRAINING
    clock.now += 0.2
    assert process.phase is Phase.ENDING
    assert not process.serving


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_the_drain_short(clock: Clock, second: signal.Signals) -> None:
    process = Lifecycle(drain_timeout=30.0)
    process.signalled(signal.SIGTERM)
    process.signalled(second)
    assert process.phase is Phase.ENDING


def test_sigint_ends_at_once_and_no_sigterm_brings_the_drain_back(clock: Clock) -> None:
    process = Lifecycle(drain_timeout=30.0)
    process.signalled(signal.SIGINT)
    assert process.phase is Phase.ENDING
    process.signalled(signal.SIGTERM)
    process.drain()
    assert process.phase is Phase.ENDING


def test_a_timeout_of_zero_ends_at_once(clock: Clock) -> None:
    process = Lifecycle(drain_timeout=0.0)
    process.signalled(signal.SIGTERM)
    assert process.phase is Phase.ENDING


@pytest.fixture
def as_process_1() -> tuple[str, ...]:
    """Put before a command, it makes that process 1 of a PID namespace."""
    command = ("unshare", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("a PID namespace takes unshare and root")
    if (trial := subprocess.run([*command, "true"], capture_output=True, text=True)).returncode != 0:
        pytest.skip(impossible(trial.stderr.strip()))
    return command


@pytest.mark.parametrize(("handled", "code"), [(True, 128 + signal.SIGTERM), (False, 7)])
def test_sigterm_ends_process_1_while_it_starts(as_process_1: tuple[str, ...], handled: bool, code: int) -> None:
    """As in a container: without a handler the kernel drops the signal, and the program runs to its end."""
    program = f"""
import os, signal
from service.lifecycle import end_on_sigterm_until_served
assert os.getpid() == 1
if {handled}:
    end_on_sigterm_until_served()
os.kill(1, signal.SIGTERM)
raise SystemExit(7)
"""
    done = subprocess.run(
        [*as_process_1, sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    assert done.returncode == code
