"""`hisparse-pd serve`: starts and stops a gateway, prefill and decode processes on this machine."""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO

import httpx

from base.errors import StartupError
from base.phase import Phase
from cli.config import ServeConfig
from cli.flags import Flags, changed_flags
from cli.reasons import Reason
from decode_node.config import DecodeConfig
from gateway.config import API_KEYS_VARIABLE, GatewayConfig
from hisparse.config import parse_config
from model.checkpoint import read_json
from prefill_node.config import PrefillConfig
from service.checkpoint import identify
from service.config import check_clients
from service.lifecycle import STOP_SIGNALS, Lifecycle
from service.node_checks import check
from transfer.shm import SHM, maps_other_processes

_PR_SET_PDEATHSIG = 1
_TERMINATE_S = 15.0
_POLL_S = 0.1
LOOPBACK = "127.0.0.1"
_PORTS = range(20000, 32000)
RANK_PORTS = 2
"""From a rank's port to that of the next one: HTTP and control ports usually are neighbours."""
_NOT_OF_NODES = frozenset({"host", "insecure"})
"""Flags that nodes do not get: they stay on the loopback interface."""
_claims: deque[socket.socket] = deque(maxlen=64)
"""Claims on the last ports that `free_port` returned, held until a process has had time to listen there."""


@dataclass(frozen=True)
class Child:
    """A process to start. words: its command line after `hisparse-pd`."""

    name: str
    words: list[str]
    http_port: int
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that no other process gets."""
    descriptors: tuple[int, ...] = ()
    """File descriptors that it inherits."""


@dataclass(frozen=True)
class ServePlan:
    """What `serve` starts. port: the gateway's HTTP port. devices: the nodes' devices, taken in turn."""

    config: ServeConfig
    port: int
    devices: tuple[str, ...]

    @property
    def url(self) -> str:
        """The gateway's address on this machine."""
        host = LOOPBACK if self.config.host in ("0.0.0.0", "::") else self.config.host
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self.config.ssl_certfile else 'http'}://{host}:{self.port}"

    def children(self) -> list[Child]:
        """The processes, the gateway first, on ports that are free now."""
        config, control_port = self.config, free_port()
        if config.transfer_protocol == "auto" and maps_other_processes():
            # Engines of the others would listen at every address of the machine, and nothing would use them.
            config = replace(config, transfer_protocol=SHM.name)
        gateway = {**changed_flags(GatewayConfig, config, without={"api_keys"}), "--port": self.port}
        # Other machines reach the gateway's HTTP port only.
        gateway |= {"--host": config.host, "--control-host": LOOPBACK, "--control-port": control_port}
        # In the environment of this process alone: anyone can see a command line.
        keys = {API_KEYS_VARIABLE: " ".join(config.api_keys)} if config.api_keys else {}
        children = [Child("gateway", ["gateway", *arguments(gateway)], self.port, keys)]
        prefill = changed_flags(PrefillConfig, config, without=_NOT_OF_NODES)
        decode = changed_flags(DecodeConfig, config, without=_NOT_OF_NODES)
        nodes = [("prefill", number, prefill) for number in range(config.prefill_nodes)]
        nodes += [("decode", number, decode) for number in range(config.decode_nodes)]
        devices = itertools.cycle(self.devices)
        for role, number, flags in nodes:
            ranks = config.decode_ranks if role == "decode" else config.prefill_ranks
            # A node of several ranks has the GPUs from its device on.
            device, *_ = itertools.islice(devices, ranks)
            port = free_port(ranks)
            own = {"--gateway": f"{LOOPBACK}:{control_port}", "--port": port, "--control-port": 0, "--device": device}
            if ranks > 1:
                own["--ranks"] = ranks
            children.append(Child(f"{role}-{number}", [role, *arguments({**flags, **own})], port))
        return children


def plan(config: ServeConfig) -> ServePlan:
    """What to start for these flags. Raises StartupError if nothing would compute prompts, or if GPUs are too few."""
    if config.prefill_nodes == 0 and not config.allow_local_prefill:
        raise StartupError(
            "--prefill-nodes 0: nothing would compute prompts; give --allow-local-prefill to let decode nodes do it"
        )
    ranks = config.prefill_nodes * config.prefill_ranks + config.decode_nodes * config.decode_ranks
    devices = devices_for(config.device, ranks, config.mem_fraction_static)
    return ServePlan(config, config.port or free_port(), devices)


def check_start(config: ServeConfig) -> None:
    """Raises StartupError for what one of the processes would refuse, as far as flags and small files tell.

    Before any is started: the others would load a model meanwhile.
    """
    # Nodes stay on the loopback interface.
    check(replace(config, host=LOOPBACK, insecure=False))
    check_clients(config.host, bool(config.api_keys or config.api_key_file), config.insecure)
    identify(config.model_path)
    top_k = read_json(config.model_path / "config.json").get("index_topk")
    if isinstance(top_k, int):  # else it is no model that nodes take, which they say
        parse_config(config.hisparse_config, top_k)


def devices_for(device: str, num_nodes: int, mem_fraction: float | None) -> tuple[str, ...]:
    """The devices that `serve --device` means. Raises StartupError if GPUs are too few and nodes may not share them."""
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
    import torch  # takes seconds, and only `cuda` needs it

    return torch.cuda.device_count()


def arguments(flags: Flags) -> list[str]:
    """The flags as words of a command line. A flag with several values is repeated."""
    words = []
    for name, value in flags.items():
        if value is True:
            words.append(name)
        elif isinstance(value, tuple):
            words += [word for each in value for word in (name, str(each))]
        elif value is not None and value is not False:
            words += [name, str(value)]
    return words


def serve_until_stopped(plan: ServePlan) -> int:
    """Run the plan until SIGTERM or SIGINT (returns 0), or until a process ends (returns its exit code, at least 1).

    On SIGTERM the gateway drains while the nodes serve on. On SIGINT everything ends at once. The process that ended is
    named last, with its reason, after the output of the others. Raises StartupError if another process has the
    gateway's port: that one would be asked whether it is ready.
    """
    if (error := bind_error(plan.config.host, plan.port)) is not None:
        raise StartupError(
            f"--port {plan.port}: {plan.config.host} cannot be listened on ({error.strerror})"
        ) from error
    lifecycle = Lifecycle(plan.config.drain_timeout)
    woken = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        lifecycle.signalled(number)
        woken.set()

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)
    announced = False
    ended: tuple[str, int] | None = None
    planned = plan.children()
    reasons = {child.name: Reason() for child in planned}
    with processes([_reporting(child, reasons[child.name]) for child in planned]) as children:
        while not ended and not woken.wait(_POLL_S):
            polled = ((name, child.poll()) for name, child in children.items())
            ended = next(((name, code) for name, code in polled if code is not None), None)
            if not ended and not announced and is_ready(plan.url, plan.config.ssl_certfile):
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
    why = f": {reason}" if (reason := reasons[name].read()) else f" ended with code {code}"
    print(f"error: {name}{why}; the others were stopped", file=sys.stderr)
    return code if code > 0 else 1


def _reporting(child: Child, reason: Reason) -> Child:
    """The process, which leaves there why it ends."""
    return replace(child, secrets={**child.secrets, **reason.variables}, descriptors=(*child.descriptors, reason.fd))


@contextlib.contextmanager
def processes(plan: list[Child], log: IO[bytes] | None = None) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the processes, and end them at the end, also if this process is killed. log: the file for their output."""
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
                pass_fds=child.descriptors,
            )
        yield children
    finally:
        terminate(list(children.values()))


def terminate(children: list["subprocess.Popen[bytes]"], patience: float = _TERMINATE_S) -> None:
    """End the processes: SIGTERM for those without handlers, SIGINT for others, SIGKILL after `patience` seconds."""
    for child in children:
        for number in STOP_SIGNALS:
            if child.poll() is None:
                child.send_signal(number)
    deadline = time.monotonic() + patience
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port(ranks: int = 1) -> int:
    """A TCP port that is free on the loopback interface, and that this function returns to no other process soon.

    It is below the range for outgoing connections, one of which could take it before its use. ranks: of the node that
    it is for; the ports of the other ranks are free, too.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        claims = [_claim(rank_port) for rank_port in range(port, port + RANK_PORTS * ranks, RANK_PORTS)]
        free = [claim for claim in claims if claim is not None]
        if len(free) == ranks:
            _claims.extend(free)
            return port
        for claim in free:
            claim.close()
    raise StartupError(f"no free TCP port from {_PORTS.start} to {_PORTS.stop - 1}")


def bind_error(host: str, port: int) -> OSError | None:
    """Why a server could not listen at an address; None if it could."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind((host, port))
    except OSError as error:
        return error
    return None


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX)
    with socket.socket() as probe, contextlib.suppress(OSError):
        claim.bind(f"\0hisparse-pd/port/{port}")  # only one process can have a name
        probe.bind((LOOPBACK, port))
        return claim
    claim.close()
    return None


def is_ready(base_url: str, certfile: Path | None = None) -> bool:
    """Whether the process at that address can serve. certfile: the certificate that it must have, over HTTPS."""
    try:
        trust = True if certfile is None else _only(certfile)
        # Without the environment's proxies: it is a process of this machine.
        return httpx.get(f"{base_url}/ready", timeout=2.0, verify=trust, trust_env=False).status_code == 200
    except (httpx.TransportError, OSError):
        return False


def _only(certfile: Path) -> ssl.SSLContext:
    """A context that trusts this certificate alone, whatever its name: the process is asked by its address."""
    trust = ssl.create_default_context(cafile=str(certfile))
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust.check_hostname = False
    return trust


def die_with_parent() -> None:
    """In a new process: have it killed when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
