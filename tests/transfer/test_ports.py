"""Mooncake's ports: which they are, who gets them, and that a session is reached again after restarts."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from base.errors import StartupError
from tests.e2e.hosts import Network, why_not
from transfer.ports import ClaimedPorts, listening_ports, parse_ports, reachable_addresses

RECEIVER = """
import json, os, sys
import numpy as np
from transfer.engine import KVTransferEngine
from transfer.memory import BufferInfo
from transfer.ports import ClaimedPorts, parse_ports

ports = ClaimedPorts(parse_ports(sys.argv[1], engines=1), engines=1)
ports.release(0)
engine = KVTransferEngine("127.0.0.1", "tcp")
ports.check(engine.ports)
buffer = np.zeros(4096, dtype=np.uint8)
engine.register(BufferInfo(ptrs=(buffer.ctypes.data,), lengths=(4096,), item_lengths=(1,)))
print(json.dumps([engine.session.name, engine.ports, buffer.ctypes.data]), flush=True)
sys.stdin.readline()
os._exit(0)
"""

SENDER = """
import os, sys
import numpy as np
from transfer.engine import KVTransferEngine
from transfer.memory import BufferInfo, Session
from transfer.planner import Descriptors

engine = KVTransferEngine("127.0.0.1", "tcp")
source = np.ones(4096, dtype=np.uint8)
engine.register(BufferInfo(ptrs=(source.ctypes.data,), lengths=(4096,), item_lengths=(1,)))
for line in sys.stdin:
    name, address = line.split()
    columns = (np.array([value]) for value in (source.ctypes.data, int(address), 4096))
    print(engine.channel(Session(transport="tcp", name=name)).submit(Descriptors(*columns)).wait(), flush=True)
os._exit(0)
"""


@contextmanager
def process(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that is asked and answers in lines; killed in the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as started:
        try:
            yield started
        finally:
            started.kill()


def line_of(started: "subprocess.Popen[str]") -> str:
    assert started.stdout is not None
    return started.stdout.readline()


def test_an_engine_has_two_neighbouring_ports_to_itself() -> None:
    with ExitStack() as at_end:
        receivers = [at_end.enter_context(process(sys.executable, "-c", RECEIVER, "21100-21107")) for _ in range(4)]
        answers = [json.loads(line_of(receiver)) for receiver in receivers]
        for session, ports, _ in answers:
            assert int(session.removeprefix("127.0.0.1:")) in ports, "the handshake port names the session"
        assert sorted(ports for _, ports, _ in answers) == [[port, port + 1] for port in range(21100, 21108, 2)]
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
        with process(*host.prefix, sys.executable, "-c", SENDER) as sender:
            assert sender.stdin is not None
            while repeated < 3:
                with process(*host.prefix, sys.executable, "-c", RECEIVER, "21000-21003") as receiver:
                    session, _, address = json.loads(line_of(receiver))
                    repeated += session in seen
                    seen.add(session)
                    failures = []
                    for _ in range(3):
                        print(session, address, file=sender.stdin, flush=True)
                        failures.append(int(line_of(sender)))
                    assert failures[-1] == 0, "the first may find a connection of the old process"


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


def test_ranges_that_work() -> None:
    assert parse_ports("1024-1025", engines=1) == range(1024, 1026)
    assert len(parse_ports("61000-65535", engines=2)) == 4536


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
