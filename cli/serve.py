"""`hisparse-pd serve`: a gateway, prefill and decode processes on one machine, started and stopped together."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import httpx

from service.errors import StartupError

_PR_SET_PDEATHSIG = 1
_TERMINATE_S = 15.0
_POLL_S = 0.1
_LOOPBACK = "127.0.0.1"
_PORTS = range(20000, 32000)

Flags = Mapping[str, object]


@dataclass(frozen=True)
class ServePlan:
    """What to start. Flags map a flag's name to its value; None and False leave it out, True stands for itself."""

    host: str
    port: int
    api_key: str | None
    num_prefill: int
    num_decode: int
    gateway_flags: Flags
    prefill_flags: Flags
    decode_flags: Flags

    def children(self) -> list["Child"]:
        """Every process, the gateway first, on ports that are free now."""
        control_port = free_port()
        gateway = {**self.gateway_flags, "--host": self.host, "--port": self.port}
        # Only clients may come from elsewhere.
        gateway |= {"--control-host": _LOOPBACK, "--control-port": control_port}
        children = [Child("gateway", ["gateway", *arguments(gateway)], self.port)]
        for role, count, flags in (
            ("prefill", self.num_prefill, self.prefill_flags),
            ("decode", self.num_decode, self.decode_flags),
        ):
            for number in range(count):
                port = free_port()
                own = {"--gateway": f"{_LOOPBACK}:{control_port}", "--port": port, "--control-port": 0}
                children.append(Child(f"{role}-{number}", [role, *arguments({**flags, **own})], port))
        return children


@dataclass(frozen=True)
class Child:
    """A process to start: its name, its command line after `hisparse-pd`, and its HTTP port."""

    name: str
    words: list[str]
    http_port: int


def arguments(flags: Flags) -> list[str]:
    """Command-line arguments that say the same as the flags."""
    words = []
    for name, value in flags.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, str(value)]
    return words


def serve_until_stopped(plan: ServePlan) -> int:
    """Run the plan until SIGTERM or SIGINT (0) or until a process ends by itself (its exit code, at least 1)."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    environment = dict(os.environ)
    if plan.api_key:
        environment["HISPARSE_PD_API_KEY"] = plan.api_key
    announced = False
    with processes(plan.children(), environment) as children:
        while not stopping.wait(_POLL_S):
            for name, child in children.items():
                if (code := child.poll()) is not None:
                    print(f"error: {name} ended with code {code}; stopping the others", file=sys.stderr)
                    return code if code > 0 else 1
            if not announced and is_ready(f"http://{reachable(plan.host)}:{plan.port}"):
                announced = True
                print(f"ready: OpenAI API at http://{reachable(plan.host)}:{plan.port}/v1", flush=True)
    return 0


@contextlib.contextmanager
def processes(
    plan: list[Child], environment: Mapping[str, str] | None = None, log: IO[bytes] | None = None
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the processes, and end all of them on the way out, also if this process is killed.

    `log` takes their output; by default it goes where this process's goes.
    """
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for child in plan:
            children[child.name] = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *child.words],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        yield children
    finally:
        terminate(list(children.values()))


def terminate(children: list["subprocess.Popen[bytes]"]) -> None:
    """SIGTERM, and SIGKILL for what is left after a while."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + _TERMINATE_S
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port() -> int:
    """A TCP port that is free on the loopback interface now.

    From below the range that systems hand out for outgoing connections, one of which could take it before its use.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StartupError(f"no free TCP port from {_PORTS.start} to {_PORTS.stop - 1}")


def is_ready(base_url: str) -> bool:
    """Whether the process at that address says that it can serve."""
    try:
        return httpx.get(f"{base_url}/ready", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


def wait_ready(base_url: str, children: Mapping[str, "subprocess.Popen[bytes]"], timeout: float) -> None:
    """Wait until the gateway can serve. Raises StartupError if a process ends first or the time is over."""
    deadline = time.monotonic() + timeout
    while not is_ready(base_url):
        for name, child in children.items():
            if child.poll() is not None:
                raise StartupError(f"{name} ended with code {child.returncode} before the service was ready")
        if time.monotonic() > deadline:
            raise StartupError(f"the service at {base_url} was not ready within {timeout:.0f} s")
        time.sleep(_POLL_S)


def reachable(host: str) -> str:
    """An address at which a process bound to `host` can be reached from this machine."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
