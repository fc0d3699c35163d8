"""Flags arrive in the configuration under their own names."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import decode_node.process
import gateway.process
import prefill_node.process
from base.version import VERSION
from cli.config import ServeConfig
from cli.flags import declared_flags
from cli.main import main, title
from cli.panels import PANEL_OF, PANELS
from cli.refusals import OTHER_NAMES
from control.codec import PROTOCOL_VERSION
from decode_node.config import DecodeConfig
from gateway.config import GatewayConfig
from prefill_node.config import PrefillConfig

Refused = Callable[..., str]


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


def test_flags_arrive_under_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPARSE_PD_API_KEY", "the command line goes first")
    words = "--model-path /m --host 10.0.0.1 --api-key a --api-key b --max-body-mib 8 --header-timeout 2.5"
    config = run(monkeypatch, "gateway", *words.split())
    given = {"host": "10.0.0.1", "api_keys": ("a", "b"), "max_body_mib": 8, "header_timeout": 2.5}
    assert config == GatewayConfig(model_path=Path("/m"), port=8000, control_port=8001, **given)
    assert (config.model_names, config.bound_control_host) == (("/m",), "10.0.0.1")
    assert config.advertised_host == "10.0.0.1"


@pytest.mark.parametrize(("text", "keys"), [("a", ("a",)), (" a b\n", ("a", "b")), ("a,b, c", ("a", "b", "c"))])
def test_api_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, keys: tuple[str, ...]) -> None:
    monkeypatch.setenv("HISPARSE_PD_API_KEY", text)
    assert run(monkeypatch, "gateway", "--model-path", "/m").api_keys == keys


@pytest.mark.parametrize("text", ["", " ", ","])
def test_a_variable_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, refused: Refused, text: str) -> None:
    """It is not taken for no authentication."""
    monkeypatch.setenv("HISPARSE_PD_API_KEY", text)
    for command in ("gateway", "serve"):
        assert "HISPARSE_PD_API_KEY is set and holds no key" in refused(command, "--model-path", "/m")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--port 70000", "--port 70000: input should be less than or equal to 65535"),
        ("--page-size 0", "--page-size 0: input should be greater than or equal to 1"),
        ("--drain-timeout soon", "--drain-timeout soon: input should be a valid number, unable to parse"),
        ("--dtype int4", "--dtype int4: 'int4' is not one of 'auto', 'float32', 'bfloat16'."),
        ("", "Missing option '--model-path'."),
    ],
)
@pytest.mark.parametrize("command", ["prefill", "decode", "serve"])
def test_a_refusal_is_one_line_with_flag_and_value(refused: Refused, command: str, words: str, error: str) -> None:
    model = ["--model-path", "/m"] if words else []
    assert refused(command, *model, *words.split()).startswith(f"error: {error}")


def test_the_version_is_that_of_the_program_and_of_its_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hisparse-pd {VERSION}, wire protocol {PROTOCOL_VERSION}\n"


SLOW = {"torch", "transformers", "fastapi"}


@pytest.mark.parametrize(
    ("words", "slow", "said"),
    [
        *(
            (words, {*SLOW, "zmq", "numpy"}, "")
            for words in (["--help"], ["serve", "--help"], ["bench", "transfer", "--help"])
        ),
        (["quarantine", "list", "--url", "http://127.0.0.1:1"], SLOW, "error: cannot reach http://127.0.0.1:1: "),
    ],
)
def test_what_should_start_at_once_loads_nothing_that_takes_long(words: list[str], slow: set[str], said: str) -> None:
    code = (
        "import sys\n"
        "from cli.main import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit:\n"
        f"    sys.exit(', '.join({slow} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stderr[: len(said) or None]) == (0, said)


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


def test_a_directory_with_files_is_not_written_over(refused: Refused, tmp_path: Path) -> None:
    foreign = tmp_path / "config.json"
    foreign.write_text("{}")
    shape = ("--shape", "glm-5.2", "--config-only")
    assert refused("tiny-model", str(tmp_path), *shape) == (
        f"error: tiny-model: {tmp_path} is not empty; give another directory, or --force"
    )
    assert foreign.read_text() == "{}"
    with pytest.raises(SystemExit) as ended:
        main(["tiny-model", str(tmp_path), *shape, "--force"])
    assert ended.value.code == 0
    assert "glm_moe_dsa" in foreign.read_text()


COMMANDS = {"serve": ServeConfig, "prefill": PrefillConfig, "decode": DecodeConfig, "gateway": GatewayConfig}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_groups_flags_by_subject_and_cuts_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "-h"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    sections = {section.partition(":\n")[0]: section for section in text.split("\n\n")[2:]}
    assert set(sections) <= {*PANELS, "Options"}
    for flag in declared_flags(COMMANDS[command]):
        found = [panel for panel, section in sections.items() if re.search(rf"^  .*{flag.name}\b(?!-)", section, re.M)]
        assert PANEL_OF.get(flag.field.name, "Options") in found, flag.name


def test_every_field_of_a_panel_is_one() -> None:
    fields = {flag.field.name for kind in COMMANDS.values() for flag in declared_flags(kind)}
    assert [name for names in PANELS.values() for name in names.split() if name not in fields] == []


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("serve --model-path /m --tensor-parallel-size 8", "--decode-ranks"),
        ("decode --model-path /m --max-model-len=4096", "--context-length"),
        ("prefill --model /m", "--model-path"),
        ("decode --model-path /m --gpu-memory-utilization 0.9", "--mem-fraction-static"),
        ("serve --model-path /m --dp 2", "--prefill-ranks"),
    ],
)
def test_a_flag_of_another_server_is_answered_with_ours(refused: Refused, words: str, flag: str) -> None:
    assert flag in refused(*words.split())


def test_every_flag_that_is_named_instead_exists() -> None:
    names = {flag.name for kind in (ServeConfig, DecodeConfig) for flag in declared_flags(kind)}
    for answer in OTHER_NAMES.values():
        assert all(f"--{flag.removeprefix('no-')}" in names for flag in re.findall(r"--([a-z-]+)", answer))
    assert not names & OTHER_NAMES.keys()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_without_a_gateway_does_not_start(refused: Refused, role: str) -> None:
    assert "--gateway: a node gets its requests from gateways; give HOST:PORT" in refused(role, "--model-path", "/m")
