"""The port of the HTTP status page: an address that cannot be had is said with the flag that named it."""

import pytest

from base.errors import StartupError
from service.status import bind_http


@pytest.mark.parametrize("host", ["a..b", "no-such-host.invalid", "ü..b", "a\0b"])
def test_a_host_that_cannot_be_bound_is_a_startup_error_that_names_the_flag(host: str) -> None:
    """Also one that Python itself refuses, with a TypeError."""
    with pytest.raises(StartupError, match=r"cannot bind the HTTP port .*choose another --host"):
        bind_http(host, 0)


def test_a_taken_port_is_a_startup_error_that_names_the_flag() -> None:
    with bind_http("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: .*choose another --port"):
            bind_http("127.0.0.1", port)
