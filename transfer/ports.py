"""Two ports for each Mooncake engine of a process, claimed before Mooncake is loaded.

Mooncake draws a handshake port, which names the session, and a data port at random from one range per process. Peers
never forget a session's data port. If a restarted process had the same session with another data port, they would write
to a port without a listener. So every engine has exactly two ports to choose from: the one decides the other.
"""

import os
import random
import re
import socket
from collections.abc import Iterable
from ipaddress import ip_address

import psutil

from base.errors import StartupError

PORTS_PER_ENGINE = 2
_HANDED_OUT = range(32768, 61000)
"""To outgoing connections. Mooncake takes its default range, without a word, if the given one touches these."""
_UNPRIVILEGED = range(1024, 65536)


def parse_ports(text: str, engines: int) -> range:
    """Parse MIN-MAX, both included, for that many engines. Raises StartupError."""
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if match is None:
        raise StartupError(f"--transfer-ports {text}: expected MIN-MAX, as in 15000-15015")
    first, last = int(match[1]), int(match[2])
    if first not in _UNPRIVILEGED or last not in _UNPRIVILEGED or first > last:
        raise StartupError(f"--transfer-ports {text}: expected MIN-MAX from 1024 to 65535, the smaller first")
    if first < _HANDED_OUT.stop and last >= _HANDED_OUT.start:
        raise StartupError(
            f"--transfer-ports {text}: Mooncake takes none from {_HANDED_OUT.start} to {_HANDED_OUT.stop - 1}, "
            "which systems hand out to outgoing connections; choose others"
        )
    ports = range(first, last + 1)
    if len(ports) < engines * PORTS_PER_ENGINE:
        raise StartupError(
            f"--transfer-ports {text}: {len(ports)} ports, but {engines * PORTS_PER_ENGINE} are needed, "
            f"{PORTS_PER_ENGINE} per engine"
        )
    return ports


class ClaimedPorts:
    """Neighbouring ports for the engines of this process, until it ends. Mooncake must not be loaded before.

    Raises StartupError if the range has none left.
    """

    def __init__(self, within: range, engines: int) -> None:
        self._ports, self._claim, self._held = _claim(within, engines * PORTS_PER_ENGINE)
        os.environ["MC_MIN_RPC_PORT"] = str(self._ports[0])
        os.environ["MC_MAX_RPC_PORT"] = str(self._ports[-1])

    def release(self, engine: int) -> None:
        """Free an engine's two ports right before it starts. It finds no others, since those are held."""
        for port in self._ports[engine * PORTS_PER_ENGINE : (engine + 1) * PORTS_PER_ENGINE]:
            self._held.pop(port).close()

    def check(self, taken: Iterable[int]) -> None:
        """Raises StartupError if Mooncake took other ports, which firewall rules do not expect."""
        if others := set(taken) - set(self._ports):
            raise StartupError(
                f"Mooncake listens on {', '.join(map(str, sorted(others)))}, outside --transfer-ports: this version "
                "ignores MC_MIN_RPC_PORT and MC_MAX_RPC_PORT"
            )


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def reachable_addresses() -> list[str]:
    """The addresses of this machine's interfaces that are up, less loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = (
        address.address.partition("%")[0]
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in up and address.family in (socket.AF_INET, socket.AF_INET6)
    )
    return sorted(address for address in found if not ip_address(address).is_loopback)


def _claim(within: range, count: int) -> tuple[range, socket.socket, dict[int, socket.socket]]:
    """That many ports, the socket whose name claims them, and the sockets that hold them, by port."""
    starts = within[: len(within) - count + 1 : count]
    # At random: the ports of an ended process stay taken for a minute.
    for first in random.sample(starts, len(starts)):
        # One process per network namespace can have this name.
        claim = _bound(socket.AF_UNIX, f"\0hisparse-pd/transfer-ports/{first}")
        if claim is None:
            continue
        # At all addresses, as Mooncake binds them.
        ports = range(first, first + count)
        held = {port: probe for port in ports if (probe := _bound(socket.AF_INET, ("", port))) is not None}
        if len(held) == count:
            return ports, claim, held
        for socket_ in (claim, *held.values()):
            socket_.close()
    raise StartupError(
        f"--transfer-ports {within[0]}-{within[-1]}: no {count} neighbouring ports are free; a process that ends "
        "leaves its own taken for a minute. Give a larger range"
    )


def _bound(family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket | None:
    """A socket that is bound to the address; None if it is taken."""
    bound = socket.socket(family)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        return None
    return bound
