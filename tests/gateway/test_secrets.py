"""A key that was given to a process is not to be seen from outside it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cli.serve import free_port
from tests.gateway.nodes import wait_until

SECRET = "sk-secret-0123456789abcdef"
ROOT = Path(__file__).parents[2]


class Process:
    def __init__(self, log: Path, command: str, *words: str, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "cli.main", command, "--port", str(self.port), "--log-level", "debug", *words],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def titles(self) -> list[str]:
        """As `ps` shows this process and its children."""
        family = [psutil.Process(self.popen.pid), *psutil.Process(self.popen.pid).children(recursive=True)]
        return [Path(f"/proc/{member.pid}/cmdline").read_text().strip("\0 ") for member in family]

    def answers(self) -> bool:
        assert self.popen.poll() is None, self.log
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*words: str, **environment: str) -> Process:
        started.append(Process(tmp_path / "log", *words, **environment))
        wait_until(started[-1].answers, timeout=60)
        return started[-1]

    yield start
    for process in started:
        process.popen.terminate()
        process.popen.wait(timeout=30)


def everything_that_it_says(process: Process) -> str:
    """Answers to good and bad requests, headers included."""
    client = httpx.Client(base_url=process.url)
    said = []
    with client:
        for key in (SECRET, "wrong", f"{SECRET}x"):
            client.headers["Authorization"] = f"Bearer {key}"
            for answer in (
                client.get("/v1/models"),
                client.get("/v1/nothing"),
                client.post("/v1/completions", content=b"{"),
                client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0}),
                client.post("/v1/completions", json={"prompt": "a"}),
                client.get("/metrics"),
                client.get("/ready"),
            ):
                said.append(f"{answer.status_code} {answer.headers} {answer.text}")
    return "\n".join(said)


def test_a_key_on_the_command_line_is_hidden(start: Callable[..., Process], checkpoint: Path) -> None:
    gateway = start("gateway", "--model-path", str(checkpoint), "--control-port", "0", "--api-key", SECRET)
    [title] = gateway.titles
    assert title.startswith("hisparse-pd gateway --")
    assert "--api-key ***" in title
    assert SECRET not in title
    said = everything_that_it_says(gateway)
    assert "401" in said
    assert "200" in said
    assert SECRET not in said
    assert "gateway starts" in gateway.log
    assert "api_keys=1" in gateway.log
    assert SECRET not in gateway.log


def test_a_start_that_fails_does_not_show_the_key() -> None:
    flags = ["--model-path", "/nonexistent", "--port", "0", "--control-port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "gateway", *flags],
        cwd=ROOT,
        env={**os.environ, "HISPARSE_PD_API_KEY": f"{SECRET} bad\u00e9key"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "error: --api-key or HISPARSE_PD_API_KEY: a key must be printable ASCII" in done.stderr
    assert SECRET not in done.stdout + done.stderr
