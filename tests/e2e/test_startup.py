"""A process that cannot serve says so in one line and exits with 2."""

import json
import logging
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from cli.main import main
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.spawn import Command, fork


@pytest.fixture
def start_here(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str]]]:
    """As `start`, in this process: for what is refused before a port is bound or a model loaded."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def start(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(word) for word in words])
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
        code = fork(Command("cli.main", [str(word) for word in words], {}, log)).wait(timeout=60)
        errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 or code != 2, log.read_text()
        return code, errors[0] if errors else log.read_text()

    return start


FREE = ("--port", 0, "--control-port", 0)


def test_a_missing_checkpoint(start_here: Start, tmp_path: Path) -> None:
    for command in ("prefill", "decode", "gateway"):
        code, error = start_here(command, "--model-path", tmp_path / "none", *FREE)
        assert code == 2
        assert "none" in error


def test_a_truncated_checkpoint(start_here: Start, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "truncated"
    shutil.copytree(checkpoints["deepseek_v32"], path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, error = start_here("prefill", "--model-path", path, *FREE)
    assert code == 2
    assert "model.safetensors" in error


def test_a_checkpoint_without_sparse_attention(start_here: Start, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "dense"
    shutil.copytree(checkpoints["deepseek_v32"], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    code, error = start_here("decode", "--model-path", path, *FREE)
    assert code == 2
    assert "not a sparse-attention (DSA) checkpoint" in error


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ('{"hot_size": 3}', "unknown key 'hot_size'"),
        ('{"device_buffer_size": 32}', "at least top_k (64)"),
        ("{", "not valid JSON"),
    ],
)
def test_a_hisparse_config_that_cannot_be_served(
    start_here: Start, checkpoints: dict[str, Path], config: str, complaint: str
) -> None:
    """sglang 22970: configurations were accepted that could not be served."""
    code, error = start_here("decode", "--model-path", checkpoints["deepseek_v32"], "--hisparse-config", config, *FREE)
    assert code == 2
    assert complaint in error


def test_more_host_memory_than_the_machine_has(start: Start, checkpoints: dict[str, Path]) -> None:
    config = '{"host_pool_gib": 100000}'
    code, error = start("decode", "--model-path", checkpoints["deepseek_v32"], "--hisparse-config", config, *FREE)
    assert code == 2
    assert "the host pool needs 100000.00 GiB, available are" in error


def test_rdma_without_a_device(start_here: Start, checkpoints: dict[str, Path]) -> None:
    code, error = start_here(
        "prefill", "--model-path", checkpoints["deepseek_v32"], "--transfer-protocol", "rdma", *FREE
    )
    assert code == 2
    assert "no RDMA device" in error


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


def test_a_prefill_node_of_another_dtype_is_refused_with_both_values(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    decode = cluster.decode()
    wait_until(lambda: "event=registered" in decode.log, timeout=60)
    other = cluster.prefill(dtype="bfloat16")
    assert other.process.wait(timeout=60) == 2
    assert "bfloat16 != float32" in other.log


def test_nodes_of_two_kv_formats_refuse_each_other_with_both_names(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    decode = cluster.decode(dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    wait_until(lambda: "event=registered" in decode.log, timeout=60)
    other = cluster.prefill(dtype="bfloat16")
    assert other.process.wait(timeout=60) == 2
    assert "kv_format bfloat16 != fp8_e4m3" in other.log


def test_a_prefill_node_of_another_model_is_refused(
    start_cluster: Callable[..., Cluster], checkpoints: dict[str, Path]
) -> None:
    cluster = start_cluster()
    decode = cluster.decode()
    wait_until(lambda: "event=registered" in decode.log, timeout=60)
    cluster.model_path = checkpoints["glm_moe_dsa"]
    other = cluster.prefill()
    assert other.process.wait(timeout=60) == 2
    assert "fingerprint" in other.log


def test_nonsense_flags_are_refused(start_here: Start, checkpoints: dict[str, Path]) -> None:
    model = checkpoints["deepseek_v32"]
    for words, complaint in (
        (("prefill", "--model-path", model, "--device", "tpu", *FREE), "expected cpu, cuda or cuda:N"),
        (("prefill", "--model-path", model, "--page-size", 0, *FREE), "--page-size 0"),
        (("prefill", "--model-path", model, "--host", "0.0.0.0", *FREE), "--advertise-host"),
        (("decode", "--model-path", model, "--context-length", 10**6, *FREE), "max_position_embeddings"),
        (("decode", "--model-path", model, "--gateway", "10.0.0.1", *FREE), "expected HOST:PORT"),
        (("decode", "--model-path", model, "--advertise-host", "a b", *FREE), "--advertise-host a b: expected"),
        (("decode", "--model-path", model, "--transfer-host", "0.0.0.0", *FREE), "--transfer-host 0.0.0.0 is not"),
        (
            ("prefill", "--model-path", model, "--transfer-ports", "40000-40010", *FREE),
            "Mooncake takes none from 32768",
        ),
        (("tiny-model", "/tmp/x", "--index-n-heads", 4), "at least 16"),
    ):
        code, error = start_here(*words)
        assert code == 2
        assert complaint in error


@pytest.mark.parametrize(
    "words",
    [
        ["prefill", "--host", "10.0.0.2"],
        ["decode", "--host", "10.0.0.3"],
        ["gateway", "--host", "10.0.0.1", "--api-key", "k"],
        ["gateway", "--control-host", "10.0.0.1"],
        ["gateway", "--host", "10.0.0.1", "--control-host", "127.0.0.1"],
    ],
)
def test_elsewhere_than_loopback_takes_keys(start_here: Start, checkpoints: dict[str, Path], words: list[str]) -> None:
    code, error = start_here(*words, "--model-path", checkpoints["deepseek_v32"], *FREE)
    assert code == 2
    assert "other machines reach it" in error
    assert "--insecure" in error


def test_a_key_directory_without_keys(start_here: Start, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for command in ("gateway", "prefill", "decode"):
        code, error = start_here(
            command, "--model-path", checkpoints["deepseek_v32"], "--key-dir", tmp_path / "none", *FREE
        )
        assert code == 2
        assert "`hisparse-pd keygen` makes it" in error
