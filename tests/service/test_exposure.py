"""What binds elsewhere than loopback takes keys, or someone who says that it need not."""

from pathlib import Path

import pytest

from base.errors import StartupError
from service.config import check_clients, check_processes, is_loopback

ELSEWHERE = ("0.0.0.0", "10.0.0.1", "::", "fe80::1", "node-7", "localhost.example", "")
HERE = ("127.0.0.1", "127.9.9.9", "::1", "localhost")


def test_loopback() -> None:
    assert [host for host in (*ELSEWHERE, *HERE) if is_loopback(host)] == list(HERE)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_elsewhere_takes_keys_or_insecure(host: str) -> None:
    with pytest.raises(StartupError, match=r"--host .*keygen.*--key-dir.*--insecure"):
        check_processes("--host", host, None, insecure=False)
    check_processes("--host", host, Path("keys"), insecure=False)
    check_processes("--host", host, None, insecure=True)
    with pytest.raises(StartupError, match=r"--host .*--api-key.*--insecure"):
        check_clients(host, has_key=False, insecure=False)
    check_clients(host, has_key=True, insecure=False)
    check_clients(host, has_key=False, insecure=True)


@pytest.mark.parametrize("host", HERE)
def test_loopback_takes_nothing(host: str) -> None:
    check_processes("--host", host, None, insecure=False)
    check_clients(host, has_key=False, insecure=False)
