"""Real processes for end-to-end tests: started one by one, killed one by one, looked into over HTTP."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cli.serve import RANK_PORTS, arguments, free_port
from tests.e2e.spawn import Command, Process, Spawn, execute

START_TIMEOUT_S = 150.0
"""A process takes five seconds of a slow core until torch is loaded, and others may share the core."""
HOT_BUFFER = json.dumps({"device_buffer_size": 128, "resident_rows": False})
"""Flags of a decode node whose long requests have misses: twice the 64 positions that tiny checkpoints select."""


def wait_until(condition: Callable[[], Any], timeout: float = 30.0, what: str = "") -> Any:
    """Poll until the condition is truthy and return its value; AssertionError after the timeout.

    Less often the longer it takes, since most conditions ask several processes.
    """
    started = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - started
        assert waited < timeout, f"timed out waiting for {what or condition}"
        time.sleep(min(max(0.02, waited / 20), 0.05))
    return value


def children_of(process: Process | subprocess.Popen[Any]) -> list[psutil.Process]:
    """All processes below it; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def all_gone(processes: Iterable[psutil.Process]) -> bool:
    def runs(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # it may end between the two questions
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return not any(map(runs, processes))


def metric_value(exposition: str, name: str, labels: Mapping[str, str]) -> float:
    """The value of a sample; 0 for values of its labels that were not seen yet.

    LookupError if there is no such metric, or if it has no such labels: a wrong name is not a zero.
    """
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    base = re.sub("_(total|bucket|count|sum)$", "", name)
    few = "".join(line for line in exposition.splitlines(keepends=True) if base in line)
    for family in text_string_to_metric_families(few):
        if name not in {family.name + suffix for suffix in suffixes.get(family.type, ("",))}:
            continue
        for sample in family.samples:
            if sample.name != name:
                continue
            if missing := labels.keys() - sample.labels.keys():
                raise LookupError(f"{name} has no label {min(missing)}, but {sorted(sample.labels)}")
            if labels.items() <= sample.labels.items():
                return sample.value
        return 0.0
    raise LookupError(f"no metric {name} is exported")


@dataclass(frozen=True)
class Place:
    """Where a process runs: `host` is its address; `inside` takes it there, `words` are put behind its command."""

    host: str = "127.0.0.1"
    inside: Callable[[], None] | None = None
    words: tuple[str, ...] = ()


@dataclass
class Node:
    """One process of a cluster."""

    name: str
    words: list[str]
    http_port: int
    control_port: int
    log_path: Path
    module: str
    environment: Mapping[str, str]
    process: Process
    place: Place = Place()

    @property
    def base_url(self) -> str:
        return f"http://{self.place.host}:{self.http_port}"

    @property
    def control_address(self) -> str:
        return f"{self.place.host}:{self.control_port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.base_url + path, timeout=10)

    def check_alive(self) -> None:
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.log[-3000:]}"

    def is_up(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str, rank: int = 0, **labels: str) -> float:
        """The value of a metric, by its name without prefix; 0 for labels that were not seen yet."""
        port = self.http_port + RANK_PORTS * rank
        exposition = httpx.get(f"http://{self.place.host}:{port}/metrics", timeout=10).text
        return metric_value(exposition, f"hisparse_pd_{name}", labels)

    def wait_unused(self, pool: str, rank: int = 0) -> None:
        """Wait until no request has anything of a pool, by the name of its metric.

        A request's slots are free when the step behind its last token is over, somewhat later than its answer.
        """
        wait_until(lambda: self.metric(pool, rank, state="used") == 0, what=f"{pool} of {self.name} to be free")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Cluster:
    """A gateway and the nodes that were added to it. Context manager: nothing runs on after it.

    Processes run `module`, where `places` says for one of that name, with what `environment` says in their environment.
    They come about by `spawn`. Nodes compute on `device`.
    """

    model_path: Path
    directory: Path
    module: str = "cli.main"
    environment: Callable[[str], Mapping[str, str]] = lambda name: {}
    places: Callable[[str], Place] = lambda name: Place()
    spawn: Spawn = execute
    device: str = "cpu"
    nodes: dict[str, Node] = field(default_factory=dict)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.kill()

    def gateway(self, name: str = "gateway", **flags: object) -> Node:
        return self._start(name, "gateway", flags)

    def prefill(self, name: str = "prefill", **flags: object) -> Node:
        return self._start(name, "prefill", self._node_flags(flags))

    def decode(self, name: str = "decode", **flags: object) -> Node:
        return self._start(name, "decode", self._node_flags(flags))

    def restart(self, node: Node) -> Node:
        """Start a process that ended again, on the same ports, at the address that its place has now."""
        assert node.process.poll() is not None
        node.place = self.places(node.name)
        node.process = self._spawn(node.words, node.log_path, node.module, node.environment, node.place)
        return node

    def wait_ready(self, timeout: float = START_TIMEOUT_S, **roles: int) -> "Cluster":
        """All processes are ready, and the gateway knows so many nodes of each role: to it, each decode rank is one."""

        def all_up() -> bool:
            for node in self.nodes.values():
                node.check_alive()
            return all(node.is_up() for node in self.nodes.values())

        wait_until(all_up, timeout, "all processes to be ready")
        for role, number in roles.items():
            known = partial(self.nodes["gateway"].metric, "nodes", role=role)
            wait_until(lambda known=known, number=number: known() == number, timeout, f"{number} {role} nodes")
        return self

    @property
    def url(self) -> str:
        return self.nodes["gateway"].base_url

    def _node_flags(self, flags: dict[str, object]) -> dict[str, object]:
        gateway = self.nodes.get("gateway")
        defaults: dict[str, object] = {"device": self.device, "transfer_protocol": "tcp", "dtype": "float32"}
        # Tests look for each step of a request.
        defaults["log_level"] = "debug"
        # Tokens do not depend on drafts: all that is tested here is tested with them.
        defaults["speculative_num_steps"] = "1"
        if gateway is not None:
            defaults["gateway"] = gateway.control_address
        return {**defaults, **flags}

    def _start(self, name: str, command: str, flags: dict[str, object]) -> Node:
        ranks = int(str(flags.get("ranks", 1)))
        http_port, control_port = free_port(ranks), int(str(flags.pop("control_port", free_port(ranks))))
        given = {f"--{key.replace('_', '-')}": value for key, value in flags.items()}
        words = [command, *arguments({"--model-path": self.model_path, **given})]
        words += ["--port", str(http_port), "--control-port", str(control_port)]
        log_path = self.directory / f"{name}.log"
        module, environment, place = self.module, self.environment(name), self.places(name)
        process = self._spawn(words, log_path, module, environment, place)
        node = Node(name, words, http_port, control_port, log_path, module, environment, process, place)
        self.nodes[name] = node
        return node

    def _spawn(
        self, words: list[str], log_path: Path, module: str, environment: Mapping[str, str], place: Place
    ) -> Process:
        here = [words[0], "--host", place.host, *words[1:], *place.words]
        return self.spawn(Command(module, here, environment, log_path, place.inside))
