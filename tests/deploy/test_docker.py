"""The Dockerfile and its scripts: linted, pinned, not root, and asking for health where the program answers."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from deploy.docker.healthcheck import PORTS, health_url
from tests.deploy.program import DEPLOY, REPOSITORY, default

DOCKER = DEPLOY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
TARGETS = {"cpu": "3.11", "cuda13": "3.12"}
every_target = pytest.mark.parametrize("target", TARGETS)
BIN = Path(sys.executable).parent


def stage(name: str) -> str:
    """The instructions of a stage, one a line."""
    text = DOCKERFILE.replace("\\\n", " ")
    return re.split(r"^FROM .*$", text.partition(f" AS {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def locked(target: str) -> dict[str, Version]:
    lines = (DOCKER / f"requirements-{target}.txt").read_text().splitlines()
    pins = (line.partition("==")[::2] for line in lines if not line.startswith("#"))
    return {name: Version(version) for name, version in pins}


def test_the_linters_find_nothing() -> None:
    scripts = sorted(map(str, [*DEPLOY.glob("*.sh"), *DEPLOY.glob("*/*.sh")]))
    for command in ([BIN / "hadolint", DOCKER / "Dockerfile"], [BIN / "shellcheck", *scripts]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


def test_what_is_copied_is_there_and_not_ignored() -> None:
    wanted = [
        line.removeprefix("!") for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if "!" in line
    ]
    assert all((REPOSITORY / path).exists() for path in wanted)
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE):
        for source in sources.split():
            assert source == "." or any(source.startswith(path) for path in wanted)
            assert (REPOSITORY / source).exists()
    packages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {name.rstrip("*") for name in packages["include"]} <= set(wanted)


@every_target
def test_the_lock_holds_what_the_package_asks_for(target: str) -> None:
    pins = locked(target)
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for line in PROJECT["dependencies"] + extras[target]]
    if target == "cuda13":
        wanted = [each for each in wanted if each.name != PROJECT["name"]] + [
            Requirement(line) for line in extras["kernels"]
        ]
    for requirement in wanted:
        pin = pins.get(requirement.name)
        assert pin is not None and pin in requirement.specifier, f"run deploy/docker/lock.sh: {requirement}"  # noqa: PT018
    assert "setuptools" in pins, "the package is built with it"


def test_both_images_have_the_same_torch_and_mooncake_as_the_set_up() -> None:
    cpu, cuda = locked("cpu"), locked("cuda13")
    assert cpu["torch"].public == cuda["torch"].public
    assert f"TORCH_VERSION={cpu['torch'].public}\n" in (DEPLOY / "setup.sh").read_text()
    assert cpu["mooncake-transfer-engine-non-cuda"] == cuda["mooncake-transfer-engine-cuda13"]
    assert cuda["nvidia-cuda-runtime"].major == 13


@pytest.mark.parametrize("command", PORTS)
def test_health_is_asked_for_at_the_port_of_the_command(command: str) -> None:
    url = f"http://127.0.0.1:{default(command, 'port')}/health"
    assert health_url(f"python\0/opt/hisparse-pd/bin/hisparse-pd\0{command}\0--host\0") == url
    assert health_url(f"/sbin/docker-init\0--\0hisparse-pd\0{command}\0") == url
    assert health_url(f"hisparse-pd {command}\0\0") == url, "a process may have set its title"
