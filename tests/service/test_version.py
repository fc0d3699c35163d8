"""What every process says of itself over HTTP."""

from fastapi import FastAPI
from fastapi.testclient import TestClient

from base.metrics import Metrics
from base.version import VERSION
from control.codec import PROTOCOL_VERSION
from service.status import status_router


def test_a_process_says_its_version_and_that_of_its_protocol() -> None:
    app = FastAPI()
    app.include_router(status_router(Metrics(), lambda: None, lambda: None))
    with TestClient(app) as client:
        assert client.get("/version").json() == {"version": VERSION, "protocol": PROTOCOL_VERSION}
