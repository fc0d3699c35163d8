"""Others' processor time is told from one's own."""

import time

import pytest

from benchmarks import disturbance
from benchmarks.disturbance import Disturbance, warning


def test_what_is_not_ones_own_is_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, machine, own = [100.0], [1000.0], [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(disturbance, "_machine_seconds", lambda: machine[0])
    monkeypatch.setattr(disturbance, "_own_seconds", lambda: own[0])
    measured = Disturbance()
    clock[0], machine[0], own[0] = 110.0, 1018.0, 53.0
    assert measured.cores() == pytest.approx(1.5)


def test_little_is_not_mentioned() -> None:
    assert warning(0.05) is None
    assert warning(0.5) is not None
