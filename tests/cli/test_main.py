"""Flags arrive in the configuration under their own names."""

from pathlib import Path
from typing import Any

import pytest

import decode_node.process
import gateway.process
import prefill_node.process
from cli.main import main, title
from cli.serve import ServePlan
from decode_node.process import DecodeConfig
from gateway.process import GatewayConfig
from prefill_node.process import PrefillConfig


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The configuration that a command would run with."""
    configs: list[Any] = []
    monkeypatch.setattr(prefill_node.process, "run_prefill_node", configs.append)
    monkeypatch.setattr(decode_node.process, "run_decode_node", configs.append)
    monkeypatch.setattr(gateway.process, "run_gateway", configs.append)
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
    network = "--transfer-host 10.1.0.3 --transfer-ports 15000-15015"
    config = run(monkeypatch, "decode", *words.split(), *network.split())
    assert config == DecodeConfig(
        model_path=Path("/m"),
        port=8020,
        control_port=8021,
        hisparse_config="{}",
        allow_local_prefill=True,
        max_running_requests=3,
        transfer_host="10.1.0.3",
        transfer_ports="15000-15015",
        log_format="json",
    )


def test_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--model-path /m --host 10.0.0.1 --api-key a --api-key b --api-key-file /k --ssl-certfile /c"
    words += (
        " --ssl-keyfile /p --max-body-mib 8 --max-total-body-mib 99 --max-concurrent-requests 9 --header-timeout 2.5"
    )
    monkeypatch.setenv("HISPARSE_PD_API_KEY", "the command line goes first")
    config = run(monkeypatch, "gateway", *words.split())
    assert config == GatewayConfig(
        model_path="/m",
        host="10.0.0.1",
        port=8000,
        control_host="10.0.0.1",
        control_port=8001,
        advertise_host="10.0.0.1",
        api_keys=("a", "b"),
        api_key_file=Path("/k"),
        ssl_certfile=Path("/c"),
        ssl_keyfile=Path("/p"),
        max_body_mib=8,
        max_total_body_mib=99,
        max_concurrent_requests=9,
        header_timeout=2.5,
    )


@pytest.mark.parametrize(("text", "keys"), [("a", ("a",)), (" a b\n", ("a", "b")), ("a,b, c", ("a", "b", "c"))])
def test_api_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, keys: tuple[str, ...]) -> None:
    monkeypatch.setenv("HISPARSE_PD_API_KEY", text)
    assert run(monkeypatch, "gateway", "--model-path", "/m").api_keys == keys


@pytest.mark.parametrize("text", ["", " ", ","])
def test_a_variable_without_a_key_is_not_taken_for_no_authentication(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv("HISPARSE_PD_API_KEY", text)
    for command in ("gateway", "serve"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--model-path", "/m"])
        assert ended.value.code == 2
        assert "HISPARSE_PD_API_KEY is set and holds no key" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["decode"], ["prefill", "--model-path", "/m", "--dtype", "int4"], ["no-such"]])
def test_usage_errors_end_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("gateway --port 8000 --api-key sk-1 --api-key sk-2", "gateway --port 8000 --api-key *** --api-key ***"),
        ("serve --api-key=sk-1 --device cpu", "serve --api-key=*** --device cpu"),
        ("prefill --gateway 10.0.0.1:8001", "prefill --gateway 10.0.0.1:8001"),
        ("", ""),
    ],
)
def test_a_process_is_listed_with_its_flags_and_without_its_keys(words: str, shown: str) -> None:
    assert title(words.split()) == f"hisparse-pd {shown}".rstrip()


def test_keys_are_given_by_flag_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["prefill", "--model-path", "/m", "--host", "10.0.0.2"]
    assert run(monkeypatch, *words, "--key-dir", "/k").key_dir == Path("/k")
    assert run(monkeypatch, *words, "--insecure").insecure is True
    monkeypatch.setenv("HISPARSE_PD_KEY_DIR", "/e")
    assert run(monkeypatch, *words).key_dir == Path("/e")


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "0.0.0.0"])
def test_serve_opens_nothing_but_the_api_to_other_machines(host: str) -> None:
    plan = ServePlan(
        host=host,
        port=1,
        api_keys=("k",),
        num_prefill=1,
        num_decode=1,
        gateway_flags={},
        prefill_flags={},
        decode_flags={},
    )
    gateway, *nodes = plan.children()
    assert gateway.words[1:3] == ["--host", host]
    assert gateway.words[gateway.words.index("--control-host") + 1] == "127.0.0.1"
    for node in nodes:
        assert "--host" not in node.words, "loopback is the default"
        assert node.words[node.words.index("--gateway") + 1].startswith("127.0.0.1:")
