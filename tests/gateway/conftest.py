"""A gateway in this process with one prefill and one decode node, reached over real sockets."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from gateway.config import GatewayConfig
from service import watched
from tests.gateway.fakes import MODEL, FakeDecodeNode, FakeNode, RunningGateway, wait_until, write_checkpoint
from tests.gateway.scripted import Service, deepseek_service, glm_service


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = deepseek_service(tmp_path_factory.mktemp("deepseek"))
    yield service
    service.close()


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = glm_service(tmp_path_factory.mktemp("glm"))
    yield service
    service.close()


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of keys are looked at with each request."""
    monkeypatch.setattr(watched, "_LOOK_EVERY_S", 0.0)


@pytest.fixture
def start_gateway(checkpoint: Path) -> Iterator[Callable[..., RunningGateway]]:
    running: list[RunningGateway] = []

    def start(**options: object) -> RunningGateway:
        options = {"port": 0, "control_port": 0, **options}
        config = GatewayConfig(model_path=checkpoint, served_model_name=MODEL, **options)  # type: ignore[arg-type]
        running.append(RunningGateway(config))
        return running[-1]

    yield start
    for gateway in running:
        gateway.stop()


@pytest.fixture
def gateway(start_gateway: Callable[..., RunningGateway], request: pytest.FixtureRequest) -> RunningGateway:
    """Its parameter, if it has one, is a dict of options."""
    return start_gateway(**getattr(request, "param", {}))


@pytest.fixture
def start_decode(gateway: RunningGateway) -> Iterator[Callable[..., FakeDecodeNode]]:
    nodes: list[FakeDecodeNode] = []

    def start(**options: object) -> FakeDecodeNode:
        nodes.append(FakeDecodeNode(gateway.control_address, **options))
        return nodes[-1].start()

    yield start
    for node in nodes:
        node.die()


@pytest.fixture
def prefill(gateway: RunningGateway) -> Iterator[FakeNode]:
    node = FakeNode(gateway.control_address, "prefill").start()
    yield node
    node.die()


@pytest.fixture
def decode(gateway: RunningGateway, prefill: FakeNode, start_decode: Callable[..., FakeDecodeNode]) -> FakeDecodeNode:
    node = start_decode()
    wait_until(lambda: httpx.get(f"{gateway.url}/ready").status_code == 200)
    return node


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def http(gateway: RunningGateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=20) as http:
        yield http
