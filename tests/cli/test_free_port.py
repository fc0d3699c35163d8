"""Ports for processes that are about to start."""

import socket
import subprocess
import sys

import pytest

from cli import serve
from cli.serve import free_port


@pytest.fixture
def two_ports(monkeypatch: pytest.MonkeyPatch) -> range:
    """The only ones to choose from, which nobody else does."""
    ports = range(19990, 19992)
    monkeypatch.setattr(serve, "_PORTS", ports)
    monkeypatch.setattr(serve, "_claims", type(serve._claims)(maxlen=64))
    return ports


def test_a_port_that_listens_is_not_chosen(two_ports: range) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", two_ports[0]))
        taken.listen()
        assert free_port() == two_ports[1]


def test_a_port_that_was_chosen_is_not_chosen_again_before_it_is_used(two_ports: range) -> None:
    """Processes take seconds to start, and other services may be started meanwhile, by other processes too."""
    mine = free_port()
    ask = f"from cli import serve; serve._PORTS = range({two_ports.start}, {two_ports.stop}); print(serve.free_port())"
    theirs = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert {mine, int(theirs)} == set(two_ports)
    assert free_port() == int(theirs), "whoever chose it has ended"
