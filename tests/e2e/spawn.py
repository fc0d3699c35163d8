"""How a process of the service comes about: executed, as users do it, or forked from one that has imported everything.

Imports take four seconds of a processor. Either runs the same command in a session of its own.
"""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Union

from cli.serve import die_with_parent


@dataclass(frozen=True)
class Command:
    """`python -m module words`. `inside` is called in the process before anything else: it may take it to another host.

    A fork gets it pickled.
    """

    module: str
    words: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    inside: Callable[[], None] | None = None

    @property
    def whole_environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}


Process = Union["subprocess.Popen[Any]", "_Forked"]
Spawn = Callable[[Command], Process]


def execute(command: Command) -> Process:
    with command.log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", command.module, *command.words],
            stdout=log,
            stderr=log,
            env=command.whole_environment,
            start_new_session=True,
            preexec_fn=command.inside,
        )


def fork(command: Command) -> Process:
    """Not for what uses a GPU."""
    return _Forked(command)


def start_fork_server() -> None:
    """Start it now, if it does not run yet: on the host of whoever asks first, where all forks are to begin with."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()


_IMPORTED = [
    "cli.main",
    "gateway.process",
    "prefill_node.process",
    "decode_node.process",
    "tests.e2e.faulty_node",
    "tests.e2e.hosts",
    "tests.e2e.spawn",
    "uvicorn.protocols.http.auto",
    "transformers.models.deepseek_v32.configuration_deepseek_v32",
    "transformers.models.glm_moe_dsa.configuration_glm_moe_dsa",
    "tests.e2e.frozen",
]
"""Nothing here starts a thread, which a fork would be without."""


class _Forked:
    """A process of multiprocessing's fork server, with the face of a subprocess.Popen."""

    def __init__(self, command: Command) -> None:
        command.log_path.touch()
        start_fork_server()
        # Whole, since the fork server's is as old as the server.
        whole = replace(command, environment=command.whole_environment)
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=(whole,), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(command: Command) -> None:
    os.setsid()
    die_with_parent()
    log = os.open(command.log_path, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    if command.inside is not None:
        command.inside()
    os.environ.clear()
    os.environ.update(command.environment)
    sys.argv = [command.module, *command.words]
    importlib.import_module(command.module).main(command.words)
