"""Flags arrive in the configuration under their own names."""

from pathlib import Path
from typing import Any

import pytest

import decode_node.process
import prefill_node.process
from cli.main import main
from cli.serve import ServePlan
from decode_node.process import DecodeConfig
from prefill_node.process import PrefillConfig


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The configuration that a command would run with."""
    configs: list[Any] = []
    monkeypatch.setattr(prefill_node.process, "run_prefill_node", configs.append)
    monkeypatch.setattr(decode_node.process, "run_decode_node", configs.append)
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0
    return configs[0]


def test_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--model-path /m --gateway a:1 --gateway b:2 --dtype float32 --page-size 16 --transfer-protocol tcp"
    config = run(monkeypatch, "prefill", *words.split(), "--log-level", "DEBUG")
    assert config == PrefillConfig(
        model_path=Path("/m"),
        gateways=("a:1", "b:2"),
        port=8010,
        control_port=8011,
        dtype="float32",
        page_size=16,
        transfer_protocol="tcp",
        log_level="debug",
    )


def test_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--model-path /m --hisparse-config {} --allow-local-prefill --max-running-requests 3 --log-format json"
    config = run(monkeypatch, "decode", *words.split())
    assert config == DecodeConfig(
        model_path=Path("/m"),
        port=8020,
        control_port=8021,
        hisparse_config="{}",
        allow_local_prefill=True,
        max_running_requests=3,
        log_format="json",
    )


@pytest.mark.parametrize("words", [["decode"], ["prefill", "--model-path", "/m", "--dtype", "int4"], ["no-such"]])
def test_usage_errors_end_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def test_keys_are_given_by_flag_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["prefill", "--model-path", "/m", "--host", "10.0.0.2"]
    assert run(monkeypatch, *words, "--key-dir", "/k").key_dir == Path("/k")
    assert run(monkeypatch, *words, "--insecure").insecure is True
    monkeypatch.setenv("HISPARSE_PD_KEY_DIR", "/e")
    assert run(monkeypatch, *words).key_dir == Path("/e")


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "0.0.0.0"])
def test_serve_opens_nothing_but_the_api_to_other_machines(host: str) -> None:
    plan = ServePlan(
        host=host, port=1, api_key="k", num_prefill=1, num_decode=1, gateway_flags={}, prefill_flags={}, decode_flags={}
    )
    gateway, *nodes = plan.children()
    assert gateway.words[1:3] == ["--host", host]
    assert gateway.words[gateway.words.index("--control-host") + 1] == "127.0.0.1"
    for node in nodes:
        assert "--host" not in node.words, "loopback is the default"
        assert node.words[node.words.index("--gateway") + 1].startswith("127.0.0.1:")
