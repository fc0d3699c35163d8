"""Mooncake's ports: which they are, who gets them, and that a session is reached again after restarts."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from base.errors import StartupError
from tests.e2e.hosts import Network, why_not
from tests.transfer.test_lingering import Process, Receiving, Sending
from transfer.ports import ClaimedPorts, listening_ports, parse_ports, reachable_addresses
from transfer.writer import Outcome


class Claiming(Receiving):
    """As a process of a node that was given a range of ports."""

    ports = "21100-21107"

    def __init__(self, host: str) -> None:
        claimed = ClaimedPorts(parse_ports(self.ports, engines=1), engines=1)
        claimed.release(0)
        super().__init__(host)
        claimed.check(self.engine.ports)

    def listens_on(self) -> list[int]:
        return list(self.engine.ports)


class ClaimingOfFew(Claiming):
    ports = "21000-21003"


@contextmanager
def process(role: type[Receiving] | type[Sending]) -> Iterator[Process]:
    started = Process(role, "127.0.0.1")
    try:
        yield started
    finally:
        started.end()


def test_an_engine_has_two_neighbouring_ports_to_itself() -> None:
    with ExitStack() as at_end:
        receivers = [at_end.enter_context(process(Claiming)) for _ in range(4)]
        taken = []
        for receiver in receivers:
            session, _, _ = receiver.do("where")
            taken.append(receiver.do("listens_on"))
            assert int(session.name.removeprefix("127.0.0.1:")) in taken[-1], "the handshake port names the session"
        assert sorted(taken) == [[port, port + 1] for port in range(21100, 21108, 2)]
        with pytest.raises(StartupError, match="--transfer-ports 21100-21107: no 2 neighbouring ports are free"):
            ClaimedPorts(range(21100, 21108), engines=1)


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_session_that_comes_back_after_a_restart_is_reached() -> None:
    """Mooncake never asks again where a session's data port is. Ports of the old process are free at once here."""
    seen = set()
    repeated = 0
    with Network("data") as network:
        host = network.host("host")
        host.run("sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_max_tw_buckets")
        with host.entered(), process(Sending) as sender:
            while repeated < 3:
                with process(ClaimingOfFew) as receiver:
                    session, address, _ = receiver.do("where")
                    repeated += session.name in seen
                    seen.add(session.name)
                    outcomes = [sender.do("write", session, address, 4096) for _ in range(3)]
                    assert outcomes[-1] is Outcome.LANDED, "the first may find a connection of the old process"


def test_engines_of_one_process_each_take_their_own_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake has one range for all of them: while one starts, the others' are held."""
    for name in ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"):
        # Of this process, and of all that other tests start from it: to be as it was.
        monkeypatch.setenv(name, "")
    claimed = ClaimedPorts(range(21200, 21204), engines=2)
    assert not any(can_bind(port) for port in range(21200, 21204))
    claimed.release(0)
    assert [port for port in range(21200, 21204) if can_bind(port)] == [21200, 21201]
    claimed.release(1)
    assert all(can_bind(port) for port in range(21200, 21204))
    claimed.check([21200, 21203])
    with pytest.raises(StartupError, match="Mooncake listens on 15123, outside --transfer-ports"):
        claimed.check([21200, 15123])


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    ("text", "engines", "why"),
    [
        ("15000", 1, "expected MIN-MAX"),
        ("15000-", 1, "expected MIN-MAX"),
        ("15001-15000", 1, "the smaller first"),
        ("80-90", 1, "from 1024 to 65535"),
        ("65000-65536", 1, "from 1024 to 65535"),
        ("40000-40010", 1, "none from 32768 to 60999"),
        ("32760-32770", 1, "none from 32768 to 60999"),
        ("15000-15000", 1, "1 ports, but 2 are needed"),
        ("15000-15002", 2, "3 ports, but 4 are needed"),
    ],
)
def test_ranges_that_cannot_work_are_refused(text: str, engines: int, why: str) -> None:
    """Mooncake takes its default range, in silence, for one that it does not like."""
    with pytest.raises(StartupError, match=f"--transfer-ports {text}: .*{why}"):
        parse_ports(text, engines)


def test_the_ports_that_a_process_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert listener.getsockname()[1] in listening_ports()
    assert listener.fileno() == -1


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_machine_is_reachable_at_what_is_not_loopback_and_is_up() -> None:
    with Network("data") as network:
        host = network.host("host")
        with host.entered():
            assert host.addresses["data"] in reachable_addresses()
        host.run("ip", "link", "set", "data", "down")
        with host.entered():
            assert reachable_addresses() == []
