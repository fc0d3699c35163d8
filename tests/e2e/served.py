"""`hisparse-pd serve` as a process of the tests, and the processes that it starts."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cli.serve import free_port, is_ready
from tests.e2e.cluster import wait_until

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def serve(checkpoints: dict[str, Path], log: Path) -> Iterator[Callable[..., tuple["subprocess.Popen[bytes]", str]]]:
    """A function that runs `hisparse-pd serve` and waits until it is ready."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str, certfile: Path | None = None) -> tuple["subprocess.Popen[bytes]", str]:
        port = free_port()
        command = [sys.executable, "-m", "cli.main", "serve", "--model-path", str(checkpoints["deepseek_v32"])]
        command += ["--served-model-name", "tiny", "--port", str(port), "--transfer-protocol", "tcp", *words]
        with log.open("ab") as output:
            running.append(
                subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, stdout=output, stderr=output)
            )
        url = f"{'http' if certfile is None else 'https'}://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url, certfile), timeout=90, what="serve to be ready")
        return running[-1], url

    yield start
    for process in running:
        process.kill()
        process.wait()


def children_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
