"""How long no kernel runs, and what a turn of the loop takes on the host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overlap.node import LONG_GAP_US, gaps

US = 1000
LONG = round(LONG_GAP_US * US)


@pytest.mark.parametrize(
    ("kernels", "all_and_long"),
    [
        ([(0, 5 * US), (6 * US, 10 * US), (10 * US + 2 * LONG, 11 * US + 2 * LONG)], (1 * US + 2 * LONG, 2 * LONG)),
        ([(0, 50 * US), (10 * US, 20 * US), (30 * US, 40 * US), (51 * US, 60 * US)], (1 * US, 0)),  # side by side
    ],
)
def test_gaps_between_kernels_are_added_up(kernels: list[tuple[int, int]], all_and_long: tuple[int, int]) -> None:
    assert gaps(kernels) == all_and_long


@pytest.mark.slow
def test_the_host_alone_is_measured_without_a_device(tmp_path: Path) -> None:
    flags = ["--host-only", "--device", "cpu", "--tokens", "20", "--batch", "1", "--batch", "3"]
    command = [sys.executable, "-m", "benchmarks.overlap", *flags, "--json", str(tmp_path / "out.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    records = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [record["batch"] for record in records] == [1, 3]
    for record in records:
        assert 0 < record["host_ms"] < record["step_ms"]
        assert record["kernels"] == 0
