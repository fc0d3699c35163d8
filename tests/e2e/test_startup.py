"""A process that cannot serve says so in one line and exits with 2."""

import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from cli.main import main
from tests.deploy.program import ROLES
from tests.e2e.cluster import START_TIMEOUT_S, wait_until
from tests.e2e.conftest import FAMILIES, StartCluster
from tests.e2e.spawn import Command, fork


def with_gateway(words: tuple[object, ...]) -> list[str]:
    """The words, with a gateway for a node, which needs one."""
    return [*map(str, words), *(("--gateway", "127.0.0.1:1") if words[0] != "gateway" else ())]


@pytest.fixture
def start_here(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str]]]:
    """As `start`, in this process: for what is refused before a port is bound or a model loaded."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def start(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit_:
            main(with_gateway(words))
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1, errors
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, errors[0]

    yield start
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


Start = Callable[..., tuple[int, str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A function that says with which code and error line `hisparse-pd` ends that is given these words."""
    log = tmp_path / "started.log"

    def start(*words: object) -> tuple[int, str]:
        code = fork(Command("cli.main", with_gateway(words), {}, log)).wait(START_TIMEOUT_S)
        errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 or code != 2, log.read_text()
        return code, errors[0] if errors else log.read_text()

    return start


BFLOAT16 = {"dtype": "bfloat16"}
FREE = ("--port", 0, "--control-port", 0)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        *((f"{command} --model-path /none", "/none") for command in ROLES),
        *((f"{command} --key-dir /none", "`hisparse-pd keygen` makes it") for command in ROLES),
        ("prefill --transfer-protocol rdma", "no RDMA device"),
        # sglang 22970: configurations were accepted that could not be served.
        ('decode --hisparse-config {"hot_size":3}', "unknown key 'hot_size'"),
        ('decode --hisparse-config {"device_buffer_size":32}', "at least top_k (64)"),
        ("decode --hisparse-config {", "not valid JSON"),
        ("prefill --device tpu", "expected cpu, cuda or cuda:N"),
        ("prefill --page-size 0", "--page-size 0"),
        ("prefill --host 0.0.0.0", "--advertise-host"),
        ("decode --context-length 1000000", "max_position_embeddings"),
        ("decode --gateway 10.0.0.1", "expected HOST:PORT"),
        ("decode --advertise-host a..b:1", "--advertise-host a..b:1: expected"),
        ("decode --transfer-host 0.0.0.0", "--transfer-host 0.0.0.0 is not"),
        ("prefill --transfer-ports 40000-40010", "Mooncake takes none from 32768"),
        # Elsewhere than on loopback it takes keys.
        ("prefill --host 10.0.0.2", "other machines reach it"),
        ("decode --host 10.0.0.3", "other machines reach it"),
        ("gateway --host 10.0.0.1 --api-key k", "other machines reach it"),
        ("gateway --control-host 10.0.0.1", "other machines reach it"),
        ("gateway --host 10.0.0.1 --control-host 127.0.0.1", "other machines reach it"),
    ],
)
def test_a_refusal_is_one_line_and_2(
    start_here: Start, checkpoints: dict[str, Path], words: str, complaint: str
) -> None:
    model = () if "--model-path" in words else ("--model-path", checkpoints["deepseek_v32"])
    code, error = start_here(*words.split(), *model, *FREE)
    assert code == 2
    assert complaint in error


def test_more_host_memory_than_the_machine_has(start: Start, checkpoints: dict[str, Path]) -> None:
    config = '{"host_pool_gib": 100000}'
    code, error = start("decode", "--model-path", checkpoints["deepseek_v32"], "--hisparse-config", config, *FREE)
    assert code == 2
    assert "the host pool needs 100000.00 GiB, available are" in error


@pytest.mark.parametrize("flag", ["--port", "--control-port"])
@pytest.mark.parametrize("command", ["gateway", "prefill", "decode"])
def test_a_port_in_use(start: Start, checkpoints: dict[str, Path], command: str, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"--port": 0, "--control-port": 0, flag: port}
        words = [word for pair in ports.items() for word in pair]
        code, error = start(command, "--model-path", checkpoints["deepseek_v32"], *words)
    assert code == 2
    assert str(port) in error
    assert flag in error


@pytest.mark.parametrize("command", ["prefill", "decode"])
def test_transfer_ports_in_use(start: Start, checkpoints: dict[str, Path], command: str) -> None:
    with socket.create_server(("", 14999)):
        words = ("--model-path", checkpoints["deepseek_v32"], "--transfer-ports", "14998-14999", *FREE)
        code, error = start(command, *words)
    assert code == 2
    assert "--transfer-ports 14998-14999: no 2 neighbouring ports are free" in error


@pytest.mark.parametrize(
    ("decode", "family", "prefill", "complaint"),
    [
        ({}, FAMILIES[0], BFLOAT16, "bfloat16 != float32"),
        ({**BFLOAT16, "kv_cache_dtype": "fp8_e4m3"}, FAMILIES[0], BFLOAT16, "bfloat16 != fp8_e4m3"),
        ({}, FAMILIES[1], {}, "fingerprint"),
    ],
    ids=["dtype", "kv-format", "model"],
)
def test_a_prefill_node_that_does_not_fit_is_refused_with_both_values(
    start_cluster: StartCluster,
    checkpoints: dict[str, Path],
    decode: dict[str, object],
    family: str,
    prefill: dict[str, object],
    complaint: str,
) -> None:
    cluster = start_cluster()
    first = cluster.decode(**decode)
    wait_until(lambda: "event=registered" in first.log, START_TIMEOUT_S)
    cluster.model_path = checkpoints[family]
    other = cluster.prefill(**prefill)
    assert other.process.wait(START_TIMEOUT_S) == 2
    assert complaint in other.log
