"""Hosts of their own on one machine: network namespaces with addresses of their own, joined by bridges.

A `Network` has a namespace for its bridges and one per host, and never touches the machine's own interfaces. Processes
of different hosts still share memory, /proc and the file system.
"""

import ctypes
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.wire import finish_packets
from tests.skips import impossible

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18
_PREFIX = "hispd"
_NAMESPACES = Path("/run/netns")
_NOBODY = "02:00:00:00:00:00"
"""A hardware address that no host has: what is sent there is lost, in silence."""


def why_not() -> str | None:
    """What keeps this machine from having such hosts, for tests to skip with; None if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "not installed: ip"
    try:
        with Network("probe") as network:
            network.host("probe")
    except subprocess.CalledProcessError as error:
        return impossible(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
    return None


@dataclass(frozen=True)
class Inside:
    """Called: this thread, and those that it starts from then on, have their sockets in that network namespace."""

    namespace: Path

    def __call__(self) -> None:
        inside = os.open(self.namespace, os.O_RDONLY)
        try:
            _enter(inside)
        finally:
            os.close(inside)


@dataclass(frozen=True)
class HostsFile:
    """Called in a process of one thread: from then on it sees that file in place of /etc/hosts, and only it does."""

    path: Path

    def __call__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if (
            libc.unshare(_CLONE_NEWNS)
            or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
            or libc.mount(bytes(self.path), b"/etc/hosts", None, _MS_BIND, None)
        ):
            raise OSError(ctypes.get_errno(), f"mounting {self.path} over /etc/hosts")


@dataclass
class Host:
    """A network namespace with an interface, of the network's name, on each of its networks.

    `addresses` are by network.
    """

    name: str
    namespace: str
    ports: dict[str, str] = field(default_factory=dict)
    """The other ends of its cables, in the switch."""
    addresses: dict[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it makes that run on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def run(self, *words: str) -> str:
        """Run a command on this host, to its end; CalledProcessError if it fails."""
        return _run(*self.prefix, *words)

    def bytes_sent(self, network: str) -> int:
        return int(self.run("cat", f"/sys/class/net/{network}/statistics/tx_bytes"))

    def move_to(self, network: str, address: str) -> None:
        """Take this address in place of the one that it has on the network."""
        self.run("ip", "address", "flush", "dev", network)
        self.run("ip", "address", "add", f"{address}/24", "dev", network)
        self.addresses[network] = address

    @property
    def inside(self) -> "Inside":
        """Takes a process here that calls it."""
        return Inside(_NAMESPACES / self.namespace)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and those that it starts meanwhile, have their sockets on this host."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self.inside()
            yield
        finally:
            _enter(before)
            os.close(before)


class Network:
    """Hosts on one or more networks, each a bridge. Context manager: nothing of it is left."""

    def __init__(self, *networks: str) -> None:
        self._networks = networks
        self._id = f"{_PREFIX}-{os.getpid()}-{random.randrange(16**4):04x}"
        self._switch = f"{self._id}-switch"
        self._wire: subprocess.Popen[str] | None = None
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> "Network":
        _remove_what_dead_processes_left()
        try:
            _run("ip", "netns", "add", self._switch)
            for network in self._networks:
                self._in_switch("link", "add", network, "type", "bridge", "forward_delay", "0")
                self._in_switch("link", "set", network, "up")
        except BaseException:
            # Whatever it was: nobody calls `__exit__` of a context that was not entered.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_wire()
        for namespace in (*(host.namespace for host in self.hosts.values()), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    def host(self, name: str, *networks: str) -> Host:
        """A new host on some of the networks, by default on all: 10.77.NETWORK.NUMBER, in the order of creation."""
        host = self.hosts[name] = Host(name, f"{self._id}-{name}")
        number = len(self.hosts)
        _run("ip", "netns", "add", host.namespace)
        host.run("ip", "link", "set", "lo", "up")
        for network in networks or self._networks:
            port = host.ports[network] = f"{network}{number}"
            self._in_switch("link", "add", port, "type", "veth", "peer", "name", network, "netns", host.namespace)
            self._in_switch("link", "set", port, "master", network, "up")
            host.run("ip", "link", "set", network, "up")
            host.move_to(network, f"10.77.{self._networks.index(network)}.{number}")
        return host

    def part(self, one: Host, other: Host, *networks: str) -> None:
        """From now on, what these two send each other is lost in silence: nothing answers and nothing is reset.

        On some of the networks, by default on all that they share.
        """
        for here, network, address in _between(one, other, networks):
            here.run("ip", "neigh", "replace", address, "lladdr", _NOBODY, "nud", "permanent", "dev", network)

    def join(self, one: Host, other: Host, *networks: str) -> None:
        """Undo `part`."""
        for here, network, address in _between(one, other, networks):
            here.run("ip", "neigh", "del", address, "dev", network)

    @contextmanager
    def impaired(self, delay_ms: float, loss: float) -> Iterator[None]:
        """Meanwhile, what any host sends is delayed and some of it lost, by tests/e2e/wire.py."""
        ends = [(host, network) for host in self.hosts.values() for network in host.addresses]
        self._insert_wire(ends, delay_ms, loss)
        try:
            yield
        finally:
            self._remove_wire(ends)

    def _insert_wire(self, ends: Sequence[tuple[Host, str]], delay_ms: float, loss: float) -> None:
        """Between each port and its bridge, there is now a process that carries the frames."""
        pairs = []
        for host, network in ends:
            with host.entered():
                finish_packets(network)
            port = host.ports[network]
            self._in_switch("link", "add", f"{port}-w", "type", "veth", "peer", "name", f"{port}-b")
            self._in_switch("link", "set", port, "nomaster")
            self._in_switch("link", "set", f"{port}-w", "up")
            self._in_switch("link", "set", f"{port}-b", "master", network, "up")
            pairs.append(f"{port}:{port}-w")
        words = ["-m", "tests.e2e.wire", "--delay-ms", str(delay_ms), "--loss", str(loss), *pairs]
        self._wire = subprocess.Popen(
            ["ip", "netns", "exec", self._switch, sys.executable, *words], stdout=subprocess.PIPE, text=True
        )
        assert self._wire.stdout is not None
        assert self._wire.stdout.readline() == "ready\n"

    def _remove_wire(self, ends: Sequence[tuple[Host, str]]) -> None:
        self._stop_wire()
        for host, network in ends:
            self._in_switch("link", "del", f"{host.ports[network]}-w")
            self._in_switch("link", "set", host.ports[network], "master", network)

    def _stop_wire(self) -> None:
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
            self._wire = None

    def _in_switch(self, *words: str) -> None:
        _run("ip", "-n", self._switch, *words)


def _between(one: Host, other: Host, networks: Sequence[str]) -> Iterator[tuple[Host, str, str]]:
    """Both directions on each of these networks, or on all that the two share: from where, over which, to whom."""
    for here, there in ((one, other), (other, one)):
        for network in networks or here.addresses.keys() & there.addresses.keys():
            yield here, network, there.addresses[network]


def _remove_what_dead_processes_left() -> None:
    for namespace in _NAMESPACES.glob(f"{_PREFIX}-*"):
        match = re.match(rf"{_PREFIX}-(\d+)-", namespace.name)
        if match and not psutil.pid_exists(int(match[1])):
            subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
