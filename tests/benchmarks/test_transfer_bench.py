"""`hisparse-pd bench transfer`, end to end on cases of a megabyte or so. What it takes is not asserted."""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.benchmarks.conftest import started
from tests.e2e.cluster import all_gone, children_of, wait_until

BENCH = [sys.executable, "-m", "cli.main", "bench", "transfer"]
METHODS = "ours,token,page,large"
SMALL = ["--tokens", "300", "--layers", "2", "--page-size", "16", "--rounds", "2", "--methods", METHODS]
ENDLESS = [*BENCH, "--tokens", "32K", "--rounds", "1000"]


def run(directory: Path, *words: str) -> dict[str, Any]:
    """Run the benchmark to its end; what it wrote."""
    files = ["--json", str(directory / "out.json"), "--png", str(directory / "out.png")]
    done = subprocess.run([*BENCH, *words, *files], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (directory / "out.png").read_bytes().startswith(b"\x89PNG")
    content: dict[str, Any] = json.loads((directory / "out.json").read_text())
    return content


def is_connected(process: psutil.Process) -> bool:
    """Whether somebody has connected to that process or it to somebody, over TCP."""
    with suppress(psutil.NoSuchProcess):
        return any(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections("tcp"))
    return False


@pytest.mark.slow
def test_every_method_is_measured_verified_and_reported(tmp_path: Path) -> None:
    content = run(tmp_path, *SMALL, "--protocol", "tcp,shm", "--destination", "contiguous,pages", "--concurrency", "2")
    assert set(content["machines"]) == {"initiator"}
    assert content["options"]["rounds"] == 2
    assert len(content["cases"]) == 4
    for case in content["cases"]:
        groups = {method["group"] for method in case["methods"]}
        assert {"ours", "page", "large"} <= groups
        assert case["bytes"] == 2 * 300 * 2 * 1152
        assert sum(method["is_best_large"] for method in case["methods"]) == 1
        for method in case["methods"]:
            assert method["bytes_verified"]
            assert len(method["runs_seconds"]) in (1, 2)
            assert method["descriptors"] >= 1
            assert method["planning_seconds"]["p50"] >= 0
    tokens = [m for case in content["cases"] for m in case["methods"] if m["group"] == "token"]
    assert {method["descriptors"] for method in tokens} == {2 * 300 * 2}
    for overlap in content["overlaps"]:
        assert len(overlap["waits"]) == len(overlap["alone"]) == 5
        assert overlap["num_bytes"] == 300 * 8 * (1152 + 256)
        assert overlap["checksums"] > 0
    assert [overlap["protocol"] for overlap in content["overlaps"]] == ["tcp", "shm"]


@pytest.mark.slow
def test_two_processes_that_were_started_apart(tmp_path: Path) -> None:
    with started([*BENCH, "--role", "target"], stdout=subprocess.PIPE, text=True) as target:
        assert target.stdout is not None
        address = target.stdout.readline().split("waiting at ")[1].split(";")[0]
        content = run(tmp_path, *SMALL, "--role", "initiator", "--target", address)
        assert set(content["machines"]) == {"initiator", "target"}
        assert content["overlaps"] == []
        assert target.wait(timeout=10) == 0, "the target ends with its initiator"


@pytest.mark.slow
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    # Nobody would read a pipe, and a full one stops the process.
    with started(ENDLESS, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        target = wait_until(lambda: children_of(process), timeout=60, what="the target to start")
        wait_until(lambda: any(map(is_connected, children_of(process))), timeout=60, what="a transfer")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
        assert all_gone(target)
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_initiator_takes_its_target_along() -> None:
    with started(ENDLESS, stderr=subprocess.DEVNULL) as process:
        target = wait_until(lambda: children_of(process), timeout=60, what="the target to start")
        process.kill()
        process.wait()
        wait_until(lambda: all_gone(target), timeout=60, what="the target to end")
