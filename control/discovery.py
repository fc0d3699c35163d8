"""Finds the gateways: every address that the names in `--gateway` have now.

A name may have several addresses, which change while the node runs (a headless Service in Kubernetes has one per
replica). A lookup may take seconds, so it has a thread of its own.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Sequence

import structlog

log = structlog.get_logger(__name__)

LOOK_UP_S = 5.0
Resolver = Callable[[str], Iterable[str]]
"""The IPv4 addresses of a host name. Raises OSError if there are none or the lookup fails."""


def resolve(host: str) -> list[str]:
    """The system's Resolver. Blocks."""
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        # What cannot be a host name (`a..b`, a label of more than 63 characters).
        raise OSError(f"{host!r} is no host name: {error}") from error
    return [str(address[0]) for _, _, _, _, address in found]


class GatewayAddresses:
    """The addresses of all gateways, kept up to date from `start` to `stop`. If a lookup fails, the last stay."""

    def __init__(self, names: Sequence[str], resolver: Resolver = resolve) -> None:
        """names: HOST:PORT each."""
        self._resolver = resolver
        self._numeric = frozenset(filter(_is_address, names))
        self._answers: dict[str, frozenset[str]] = {name: frozenset() for name in names if name not in self._numeric}
        self._failing: set[str] = set()
        self.expected = bool(names)
        """Whether the node was told of any gateway."""
        self.current = self._numeric
        """HOST:PORT of every gateway with a numeric host; empty until a name has been looked up."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        if self._answers:
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Does not wait for a lookup that is under way. Idempotent."""
        self._stopping.set()

    def look_up(self) -> None:
        for name in self._answers:
            self._look_up(name)
        self.current = self._numeric.union(*self._answers.values())

    def _run(self) -> None:
        self.look_up()
        while not self._stopping.wait(LOOK_UP_S):
            self.look_up()

    def _look_up(self, name: str) -> None:
        host, _, port = name.rpartition(":")
        try:
            answer = frozenset(f"{address}:{port}" for address in self._resolver(host))
        except OSError as error:
            if name not in self._failing:
                self._failing.add(name)
                log.warning("cannot look up a gateway", name=name, error=str(error), known=_listed(self._answers[name]))
            return
        self._failing.discard(name)
        if answer != self._answers[name]:
            log.info("gateways", name=name, addresses=_listed(answer))
            self._answers[name] = answer


def _is_address(name: str) -> bool:
    """Whether the host of HOST:PORT is numeric, and needs no lookup."""
    try:
        ipaddress.ip_address(name.rpartition(":")[0])
    except ValueError:
        return False
    return True


def _listed(addresses: Iterable[str]) -> str:
    return ",".join(sorted(addresses)) or "none"
