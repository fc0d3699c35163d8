"""The wheel, built without a network: every package is in it, the kernels' sources and the license too."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.deploy.program import DEPLOY, REPOSITORY

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
VERSIONS = ("3.11", "3.12", "3.13")


def source_files() -> list[Path]:
    """What the repository has, relative to it: a clone's files, and those that are about to be committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name and (REPOSITORY / name).exists()]


def packages() -> list[str]:
    """Top-level packages that are the program's own."""
    return sorted(
        file.parts[0]
        for file in source_files()
        if len(file.parts) == 2 and file.name == "__init__.py" and file.parts[0] != "tests"
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    for file in source_files():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / file, source / file)
    pip = ["-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist", "."]
    done = subprocess.run([sys.executable, *pip], cwd=source, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def names(wheel: zipfile.ZipFile) -> set[str]:
    return set(wheel.namelist())


def test_every_module_and_kernel_is_in_the_wheel_and_nothing_else(names: set[str]) -> None:
    assert {"base", "control", "engine", "cli"} <= set(packages())
    wanted = {
        str(file)
        for file in source_files()
        if (file.parts[0] in packages() and file.suffix == ".py")
        or (file.parts[0] == "csrc" and file.suffix in (".cu", ".cuh"))
        or str(file.parent) in ("benchmarks/passkey/checkpoint", "gateway/page")
    }
    assert wanted - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {*packages(), "csrc"}


def test_the_wheel_has_its_license_and_the_command(wheel: zipfile.ZipFile, names: set[str]) -> None:
    [about] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    assert "\nLicense-Expression: Apache-2.0\n" in wheel.read(f"{about}/METADATA").decode()
    assert f"{about}/licenses/LICENSE" in names
    assert "hisparse-pd = cli.main:main" in wheel.read(f"{about}/entry_points.txt").decode()


def test_every_list_of_packages_has_them_all() -> None:
    """A package that mypy or the import contract does not know of would be checked by neither."""
    tool = PROJECT["tool"]
    assert set(tool["mypy"]["packages"]) == set(packages())
    assert set(tool["importlinter"]["root_packages"]) == set(packages())
    layers = tool["importlinter"]["contracts"][0]["layers"]
    assert sorted(name for layer in layers for name in re.findall(r"\w+", layer)) == packages()


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    """In the classifiers, in what pip admits, in the set-up, and in what people read."""
    major, last = VERSIONS[-1].split(".")
    assert PROJECT["project"]["requires-python"] == f">={VERSIONS[0]},<{major}.{int(last) + 1}"
    minors = re.findall(
        r"^Programming Language :: Python :: (3\.\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.M
    )
    assert tuple(minors) == VERSIONS
    first, latest = (f"({version.replace('.', ', ')})" for version in (VERSIONS[0], VERSIONS[-1]))
    setup = (DEPLOY / "setup.sh").read_text()
    assert f"not {first} <= sys.version_info[:2] <= {latest}" in setup
    words = f"{', '.join(VERSIONS[:-1])} or {VERSIONS[-1]}"
    assert f"Python {words} is needed" in setup
    assert f"with Python {words}" in (REPOSITORY / "README.md").read_text()
    assert f"with Python {words}" in (REPOSITORY / "CONTRIBUTING.md").read_text()
