"""The world of remote prefills that most tests of them want."""

import pytest

from tests.decode_node.remote_world import Clock, RemoteWorld


@pytest.fixture
def h(monkeypatch: pytest.MonkeyPatch) -> RemoteWorld:
    return RemoteWorld(Clock(monkeypatch))
