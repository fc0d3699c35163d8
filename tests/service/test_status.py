"""The HTTP status page: its port, and what every process says of itself."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from base.errors import StartupError
from base.metrics import Metrics
from base.version import VERSION
from control.codec import PROTOCOL_VERSION
from service.status import bind_http, metrics_router, status_router


@pytest.mark.parametrize("host", ["a..b", "no-such-host.invalid", "ü..b", "a\0b"])
def test_a_host_that_cannot_be_bound_is_an_error_that_names_the_flag(host: str) -> None:
    """Also one that Python itself refuses, with a TypeError."""
    with pytest.raises(StartupError, match=r"cannot bind the HTTP port .*choose another --host"):
        bind_http(host, 0)


def test_a_taken_port_is_a_startup_error_that_names_the_flag() -> None:
    with bind_http("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: .*choose another --port"):
            bind_http("127.0.0.1", port)


def test_a_process_says_its_version_and_that_of_its_protocol() -> None:
    app = FastAPI()
    app.include_router(status_router(lambda: None))
    app.include_router(metrics_router(Metrics(), lambda: None))
    with TestClient(app) as client:
        assert client.get("/version").json() == {"version": VERSION, "protocol": PROTOCOL_VERSION}
