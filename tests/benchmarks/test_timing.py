"""What is timed, and what of it belongs to what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.grammar.steps import GrammarSteps
from benchmarks.kernel_times import exclusive_times
from benchmarks.overlap.node import LONG_GAP_US
from control.grammar import TextChoice
from tests.engine.grammar.small import PADDED, compiled, encode

US = 1000
LONG = round(LONG_GAP_US * US)


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


def test_a_kernel_that_waits_for_the_one_before_counts_from_its_end() -> None:
    ran = [(10.0, 14.0, "second"), (0.0, 12.0, "first"), (11.0, 11.5, "hidden"), (20.0, 21.0, "later")]
    assert exclusive_times(ran) == [("first", 0.012), ("second", 0.002), ("hidden", 0.0), ("later", 0.001)]


def test_answers_that_end_begin_again() -> None:
    grammar = compiled(TextChoice(options=("yes", "no")))
    steps = GrammarSteps(3, PADDED, layers=1, hidden_size=16, device=torch.device("cpu"), threads=1)
    pairs = steps.compare(grammar, encode("yes"), steps=5)
    steps.close()
    assert len(pairs.free) == len(pairs.bound) == 3
    assert all(step.ms > 0 for step in (*pairs.free, *pairs.bound))
