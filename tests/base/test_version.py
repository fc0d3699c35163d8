"""There is one version, in the code and in the package."""

import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_package_has_the_version_of_the_code() -> None:
    settings = tomllib.loads(PYPROJECT.read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "base.version.VERSION"}
