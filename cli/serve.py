"""`hisparse-pd serve`: a gateway, prefill and decode processes on one machine, started and stopped together."""

import contextlib
import ctypes
import itertools
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

import httpx

from base.errors import StartupError
from cli.config import ServeConfig
from cli.flags import Flags, changed_flags
from decode_node.config import DecodeConfig
from gateway.config import API_KEYS_VARIABLE, GatewayConfig
from prefill_node.config import PrefillConfig
from service.lifecycle import DRAIN_TIMEOUT_S, STOP_SIGNALS, Lifecycle, Phase

_PR_SET_PDEATHSIG = 1
_TERMINATE_S = 15.0
_POLL_S = 0.1
_LOOPBACK = "127.0.0.1"
_PORTS = range(20000, 32000)
_NOT_OF_NODES = frozenset({"host", "insecure"})
"""Nodes stay on the loopback interface."""
_claims: deque[socket.socket] = deque(maxlen=64)
"""Names of the ports that this process chose last, held until whoever is to listen there has had time to."""


@dataclass(frozen=True)
class ServePlan:
    """What to start, with which flags."""

    host: str
    port: int
    num_prefill: int
    num_decode: int
    gateway_flags: Flags
    prefill_flags: Flags
    decode_flags: Flags
    devices: tuple[str, ...] = ("cpu",)
    """What nodes run on, taken in turn."""
    drain_timeout: float = DRAIN_TIMEOUT_S
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    ssl_certfile: Path | None = None
    """The certificate that the gateway serves HTTPS with, if it does."""

    @property
    def url(self) -> str:
        """Where the gateway answers, seen from this machine."""
        return f"{'https' if self.ssl_certfile else 'http'}://{reachable(self.host)}:{self.port}"

    def children(self) -> list["Child"]:
        """Every process, the gateway first, on ports that are free now."""
        control_port = free_port()
        gateway = {**self.gateway_flags, "--host": self.host, "--port": self.port}
        # Only clients may come from elsewhere.
        gateway |= {"--control-host": _LOOPBACK, "--control-port": control_port}
        # Not on its command line, which anyone can see, and for no other process.
        keys = {API_KEYS_VARIABLE: " ".join(self.api_keys)} if self.api_keys else {}
        children = [Child("gateway", ["gateway", *arguments(gateway)], self.port, keys)]
        devices = itertools.cycle(self.devices)
        for role, count, flags in (
            ("prefill", self.num_prefill, self.prefill_flags),
            ("decode", self.num_decode, self.decode_flags),
        ):
            for number in range(count):
                port = free_port()
                own = {"--gateway": f"{_LOOPBACK}:{control_port}", "--port": port, "--control-port": 0}
                own["--device"] = next(devices)
                children.append(Child(f"{role}-{number}", [role, *arguments({**flags, **own})], port))
        return children


@dataclass(frozen=True)
class Child:
    """A process to start: its name, its command line after `hisparse-pd`, its HTTP port, and its secrets."""

    name: str
    words: list[str]
    http_port: int
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables for this process alone."""


def plan(config: ServeConfig) -> ServePlan:
    """What to start for these flags. Raises StartupError where nothing would compute prompts, or GPUs are too few."""
    if config.prefill_nodes == 0 and not config.allow_local_prefill:
        raise StartupError(
            "--prefill-nodes 0: nothing would compute prompts; give --allow-local-prefill to let decode nodes do it"
        )
    return ServePlan(
        host=config.host,
        port=config.port or free_port(),
        num_prefill=config.prefill_nodes,
        num_decode=config.decode_nodes,
        # Keys travel in the environment.
        gateway_flags=changed_flags(GatewayConfig, config, without={"api_keys"}),
        prefill_flags=changed_flags(PrefillConfig, config, without=_NOT_OF_NODES),
        decode_flags=changed_flags(DecodeConfig, config, without=_NOT_OF_NODES),
        devices=devices_for(config.device, config.prefill_nodes + config.decode_nodes, config.mem_fraction_static),
        drain_timeout=config.drain_timeout,
        api_keys=config.api_keys,
        ssl_certfile=config.ssl_certfile,
    )


def devices_for(device: str, num_nodes: int, mem_fraction: float | None) -> tuple[str, ...]:
    """The devices that `serve --device` means: with `cuda` every GPU, one node each; with any other value that one.

    Nodes share GPUs only if someone said how much each takes. Raises StartupError if there are too few.
    """
    if device != "cuda":
        return (device,)
    found = count_gpus()
    if found == 0:
        raise StartupError("--device cuda: this machine has no CUDA device")
    if num_nodes > found and mem_fraction is None:
        raise StartupError(
            f"--device cuda: {num_nodes} nodes, one per GPU, and this machine has {found}; start fewer nodes, or give "
            "--mem-fraction-static, the part of the free memory that each node may take, to let them share GPUs"
        )
    return tuple(f"cuda:{number}" for number in range(found))


def count_gpus() -> int:
    """GPUs that this process sees."""
    import torch  # which takes seconds, and no other device needs it here

    return torch.cuda.device_count()


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
    """Run the plan until SIGTERM or SIGINT (0) or until a process ends by itself (its exit code, at least 1).

    Which one that was is the last thing said, behind what the others say while they are stopped.
    On SIGTERM the gateway finishes what its clients wait for, while the nodes serve on; these have nothing left then.
    On SIGINT everything ends at once.
    """
    lifecycle = Lifecycle(plan.drain_timeout)
    woken = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        lifecycle.signalled(number)
        woken.set()

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)
    announced = False
    ended: tuple[str, int] | None = None
    with processes(plan.children()) as children:
        while not ended and not woken.wait(_POLL_S):
            polled = ((name, child.poll()) for name, child in children.items())
            ended = next(((name, code) for name, code in polled if code is not None), None)
            if not ended and not announced and is_ready(plan.url, plan.ssl_certfile):
                announced = True
                print(f"ready: OpenAI API at {plan.url}/v1", flush=True)
        gateway = children["gateway"]
        if lifecycle.phase is Phase.DRAINING:
            gateway.terminate()
        while lifecycle.phase is Phase.DRAINING and gateway.poll() is None:
            time.sleep(_POLL_S)
    if ended is None:
        return 0
    name, code = ended
    print(f"error: {name} ended with code {code}; the others were stopped", file=sys.stderr)
    return code if code > 0 else 1


@contextlib.contextmanager
def processes(plan: list[Child], log: IO[bytes] | None = None) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the processes, and end all of them on the way out, also if this process is killed.

    `log` takes their output; by default it goes where this process's goes.
    """
    public = {name: value for name, value in os.environ.items() if name != API_KEYS_VARIABLE}
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for child in plan:
            children[child.name] = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *child.words],
                env={**public, **child.secrets},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        yield children
    finally:
        terminate(list(children.values()))


def terminate(children: list["subprocess.Popen[bytes]"]) -> None:
    """End these at once, without draining; SIGKILL for what is left after a while.

    SIGTERM ends a process that does not handle signals yet, and SIGINT one that does and would drain.
    """
    for child in children:
        for number in STOP_SIGNALS:
            if child.poll() is None:
                child.send_signal(number)
    deadline = time.monotonic() + _TERMINATE_S
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port() -> int:
    """A TCP port that is free on the loopback interface now, and that nobody else who asks here gets soon.

    From below the range that systems hand out for outgoing connections, one of which could take it before its use.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(f"\0hisparse-pd/port/{port}")  # a name that only one process can have
            probe.bind((_LOOPBACK, port))
            _claims.append(claim)
            return port
        claim.close()
    raise StartupError(f"no free TCP port from {_PORTS.start} to {_PORTS.stop - 1}")


def is_ready(base_url: str, certfile: Path | None = None) -> bool:
    """Whether the process at that address says that it can serve. Over HTTPS it must have this very certificate."""
    try:
        trust = True if certfile is None else _only(certfile)
        return httpx.get(f"{base_url}/ready", timeout=2.0, verify=trust).status_code == 200
    except (httpx.TransportError, OSError):
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


def _only(certfile: Path) -> ssl.SSLContext:
    """Trusts this certificate, whoever signed it, for whatever name: the process is asked by its address."""
    trust = ssl.create_default_context(cafile=str(certfile))
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust.check_hostname = False
    return trust


def die_with_parent() -> None:
    """This process is killed when the thread ends that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
