"""Which tests run when, by their mark."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_quick(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.parametrize("number", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_some_are_slow(number): pass

@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_all_are_slow(number): pass
"""


SOME, ALL = (f"test_{word}_are_slow[{{}}]" for word in ("some", "all"))


@pytest.mark.parametrize(
    ("marks", "slow", "ran"),
    [
        ([], "", ["test_quick", SOME.format(1)]),
        (["-m", "slow"], "short", [ALL.format(1), "test_slow", SOME.format(2)]),
        (["-m", "slow"], "", [*map(ALL.format, (1, 2, 3)), "test_slow", *map(SOME.format, (2, 3))]),
    ],
)
def test_slow_tests_run_when_asked_for_and_in_short_one_of_each(
    tmp_path: Path, marks: list[str], slow: str, ran: list[str]
) -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\naddopts = {options['addopts']}\nmarkers = {options['markers'][0]}\n"
    )
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.slow", "-p", "no:cacheprovider", "-v", *marks],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HISPARSE_PD_SLOW": slow},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    passed = [line.split()[0].partition("::")[2] for line in done.stdout.splitlines() if " PASSED" in line]
    assert sorted(passed) == ran
