"""A gateway in this process with one prefill and one decode node, reached over real sockets."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from base.errors import StartupError
from gateway.config import GatewayConfig
from gateway.process import Gateway
from service import watched
from tests.gateway.nodes import CONTEXT
from tests.gateway.world import MODEL, RunningGateway, World, deepseek_service, glm_service, write_checkpoint
from tests.starting import starting


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def world(checkpoint: Path) -> Iterator[World]:
    """One for all tests of a file: none of them may leave anything behind."""
    with World(checkpoint, CONTEXT) as world:
        yield world


@pytest.fixture
def start_world(checkpoint: Path) -> Iterator[Callable[..., World]]:
    """Starts worlds with flags of the gateway."""
    with ExitStack() as worlds:
        yield lambda **flags: worlds.enter_context(World(checkpoint, CONTEXT, **flags))


@pytest.fixture
def fresh(start_world: Callable[..., World], request: pytest.FixtureRequest) -> World:
    """One for this test alone. Its parameter, if it has one, is a dict of flags."""
    return start_world(**getattr(request, "param", {}))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with deepseek_service(tmp_path_factory.mktemp("deepseek")) as service:
        yield service


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with glm_service(tmp_path_factory.mktemp("glm")) as service:
        yield service


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of keys are looked at with each request."""
    monkeypatch.setattr(watched, "_LOOK_EVERY_S", 0.0)


@pytest.fixture
def start_error(checkpoint: Path) -> Callable[..., str]:
    """Why a gateway with these options does not start."""

    def error(**options: Any) -> str:
        with pytest.raises(StartupError) as refused:
            Gateway(GatewayConfig(**{"model_path": checkpoint, "port": 0, "control_port": 0, **options}))
        assert "\n" not in str(refused.value)
        return str(refused.value)

    return error


@pytest.fixture
def start_gateway(checkpoint: Path) -> Iterator[Callable[..., RunningGateway]]:
    def start(**options: object) -> RunningGateway:
        options = {"port": 0, "control_port": 0, "served_model_name": (MODEL,), **options}
        return RunningGateway(GatewayConfig(model_path=checkpoint, **options))  # type: ignore[arg-type]

    with starting(start, RunningGateway.stop) as start_one:
        yield start_one


@pytest.fixture
def gateway(start_gateway: Callable[..., RunningGateway], request: pytest.FixtureRequest) -> RunningGateway:
    """Its parameter, if it has one, is a dict of options."""
    return start_gateway(**getattr(request, "param", {}))
