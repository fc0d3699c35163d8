"""The compose file: valid by the compose specification, with command lines that the program accepts."""

import shlex
import subprocess
import sys
from typing import Any

import yaml

from tests.deploy.program import DEPLOY, ROLES, CommandLine, default, read
from tests.deploy.rendered import every_role

COMPOSE = DEPLOY / "compose.yaml"
FILE: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]


def command_line(role: str) -> CommandLine:
    return read(SERVICES[role]["command"])


def test_the_file_is_valid() -> None:
    """By the schema of the compose specification; `docker compose config` takes a plugin that is not everywhere."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@every_role
def test_the_program_accepts_the_command_line(role: str) -> None:
    line = command_line(role)
    assert line.command == role
    assert line.values["advertise_host"] == role
    assert line.values["port"] == default(role, "port")
    if role != "gateway":
        assert line.values["gateways"] == [f"gateway:{default('gateway', 'control_port')}"]
        # Each container has its own process ids: none can map the memory of another.
        assert line.values["transfer_protocol"] == "tcp"


def test_what_is_prepared_is_what_is_used() -> None:
    (script,) = SERVICES["init"]["command"]
    made = {}
    for line in script.splitlines():
        words = shlex.split(line.partition("|| ")[2])
        if words[0] == "hisparse-pd":
            made[words[1]] = words[2]
            read(words[1:])
    for role in ROLES:
        assert str(command_line(role).values["model_path"]) == made["tiny-model"]
        assert str(command_line(role).values["key_dir"]) == made["keygen"]
        assert {f"model:{made['tiny-model']}:ro", f"keys:{made['keygen']}:ro"} == set(SERVICES[role]["volumes"])
