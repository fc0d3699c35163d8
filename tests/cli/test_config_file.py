"""`--config FILE`: what it sets, what wins over it, what is refused, and what `config show` says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import yaml

from cli.config_show import read_serve_flags
from cli.main import app, main
from cli.panels import GroupedCommand

FILE = """
model-path: /m
port: 18000
context_length: 4096
gateway: [10.0.0.1:8001, 10.0.0.2:8001]
hisparse-config: {host_pool_gib: 1}
speculative-num-steps: 3
enable-prefix-caching: false
insecure: true
mem-fraction-static: 0.5
key-dir:
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "c.yaml").write_text(text)
        return str(tmp_path / "c.yaml")

    return write


def show(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, object], dict[str, str]]:
    """What `config show` says: values, and where they are from."""
    with pytest.raises(SystemExit) as ended:
        main(["config", "show", *words])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    sources = {line.partition(":")[0]: line.rpartition("  # ")[2] for line in said.out.splitlines()}
    return yaml.safe_load(said.out), sources


def commands(group: object = None) -> list[object]:
    group = typer.main.get_command(app) if group is None else group
    below = getattr(group, "commands", None)
    return [group] if below is None else [one for each in below.values() for one in commands(each)]


def test_every_command_takes_a_file() -> None:
    assert [each for each in commands() if not isinstance(each, GroupedCommand) and each.name != "show"] == []  # type: ignore[attr-defined]


def test_a_file_sets_flags_and_the_command_line_and_the_environment_win(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HISPARSE_PD_KEY_DIR", "/keys")
    values, sources = show(capsys, "decode", "--config", file(FILE + "log-level: debug"), "--port", "9000")
    assert values["model-path"] == "/m"
    assert values["context-length"] == 4096
    assert values["gateway"] == ["10.0.0.1:8001", "10.0.0.2:8001"]
    assert values["hisparse-config"] == '{"host_pool_gib": 1}'
    assert values["speculative-num-steps"] == "3"
    assert values["enable-prefix-caching"] is False
    assert values["mem-fraction-static"] == 0.5
    assert (values["port"], sources["port"]) == (9000, "command line")
    assert (values["key-dir"], sources["key-dir"]) == ("/keys", "environment, HISPARSE_PD_KEY_DIR")
    assert (values["control-port"], sources["control-port"]) == (8021, "default")
    assert sources["log-level"] == sources["context-length"] == "--config"


def test_what_is_shown_is_a_file_that_says_the_same(
    file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "serve",
        "--model-path",
        "/m",
        "--api-key",
        "sk-secret",
        "--prefill-ranks",
        "2",
        "--no-enable-prefix-caching",
    ]
    with pytest.raises(SystemExit):
        main(["config", "show", *words])
    shown = capsys.readouterr().out
    assert "sk-secret" not in shown
    again = read_serve_flags(["--config", file(shown), "--api-key", "sk-secret"])
    assert again == read_serve_flags(words[1:])


def test_commands_below_others_take_a_file_too(file: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    values, _ = show(capsys, "bench", "serving", "--config", file("turns: 3"))
    assert values["turns"] == 3
    values, _ = show(capsys, "quarantine", "list", "--config", file("url: http://here"))
    assert values["url"] == "http://here"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot: 1", "serve has no flag --prot; did you mean port?"),
        ("- port", "expected flags with their values"),
        ("port: [1, 2]", "port: expected one value"),
        ("insecure: 3", "insecure: expected true or false, found 3"),
        ("port: true", "port: expected a value, found True"),
        ("port: many", "--port many: input should be a valid integer"),
        ("a: b: c", "mapping values are not allowed here"),
    ],
)
def test_a_file_of_anything_else_is_refused(
    refused: Callable[..., str], file: Callable[[str], str], text: str, reason: str
) -> None:
    assert reason in refused("serve", "--model-path", "/m", "--config", file(text))


def test_a_file_that_is_not_there_is_refused(refused: Callable[..., str]) -> None:
    assert "error: --config /none.yaml: [Errno 2] No such file" in refused("serve", "--config", "/none.yaml")
