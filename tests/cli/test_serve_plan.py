"""What `serve` hands to each of its processes."""

import subprocess
from pathlib import Path

import pytest

from cli import serve
from cli.serve import Child, ServePlan, processes


def plan(**changes: object) -> ServePlan:
    flags = {"--model-path": Path("/m")}
    return ServePlan(
        host="127.0.0.1",
        port=8000,
        num_prefill=1,
        num_decode=1,
        gateway_flags=flags,
        prefill_flags=flags,
        decode_flags=flags,
        **changes,  # type: ignore[arg-type]
    )


def test_keys_reach_the_gateway_alone_and_not_on_a_command_line() -> None:
    gateway, *nodes = plan(api_keys=("sk-one", "sk-two")).children()
    assert gateway.secrets == {"HISPARSE_PD_API_KEY": "sk-one sk-two"}
    assert not any(child.secrets for child in nodes)
    assert not any("sk-" in word for child in (gateway, *nodes) for word in child.words)
    assert "sk-" not in repr(gateway) + repr(plan(api_keys=("sk-one",)))


def test_a_process_without_keys_does_not_inherit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *args: object, env: dict[str, str], **options: object) -> None:
            started.append(env)
            super().__init__(["true"])

    monkeypatch.setenv("HISPARSE_PD_API_KEY", "sk-one")
    monkeypatch.setattr(serve.subprocess, "Popen", Ended)
    with processes([Child("gateway", [], 1, {"HISPARSE_PD_API_KEY": "sk-one"}), Child("decode-0", [], 2)]):
        assert [env.get("HISPARSE_PD_API_KEY") for env in started] == ["sk-one", None]


def test_the_url_says_whether_it_is_tls() -> None:
    assert plan().url == "http://127.0.0.1:8000"
    assert plan(ssl_certfile=Path("/c")).url == "https://127.0.0.1:8000"
