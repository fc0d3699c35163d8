"""Which tests run by their mark, and which skipped tests count as failed where all are to run."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_house import ROOT

SKIPPED = """
import pytest
from tests.skips import impossible

@pytest.mark.skip(reason="needs promtool")
def test_marked(): pass

def test_inside(): pytest.skip("needs root")

@pytest.fixture
def tool(): pytest.skip("not installed: nft")

def test_fixture(tool): pass

@pytest.mark.skip(reason=impossible("no network namespaces"))
def test_impossible(): pass

@pytest.mark.xfail
def test_known(): assert False

def test_runs(): pass
"""
SLOW = """
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


def run(directory: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest in a directory of its own, with plugins of this one."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("skips", "summary"),
    [("fail", "1 failed, 2 passed, 5 skipped, 2 xfailed, 2 errors"), ("", "2 passed, 8 skipped, 2 xfailed")],
)
def test_a_skipped_test_fails_unless_it_needs_a_gpu_or_is_impossible(tmp_path: Path, skips: str, summary: str) -> None:
    for directory in ("tests", "tests/gpu"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / f"test_{Path(directory).name}.py").write_text(SKIPPED)
    done = run(tmp_path, "-p", "tests.skips", "--rootdir", ".", "tests", HISPARSE_PD_SKIPS=skips)
    assert summary in done.stdout.splitlines()[-1]
    assert done.returncode == (1 if skips else 0)
    assert ("must not be skipped here (HISPARSE_PD_SKIPS=fail). Skipped: needs root" in done.stdout) is bool(skips)


@pytest.mark.parametrize(
    ("marks", "slow", "ran"),
    [
        ([], "", ["test_quick", SOME.format(1)]),
        (["-m", "slow"], "short", [ALL.format(1), "test_slow"]),
        (["-m", "slow"], "", [*map(ALL.format, (1, 2, 3)), "test_slow", *map(SOME.format, (2, 3))]),
    ],
)
def test_slow_tests_run_when_asked_for_and_in_short_those_without_fast_cases(
    tmp_path: Path, marks: list[str], slow: str, ran: list[str]
) -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    ini = f"[pytest]\naddopts = {options['addopts']}\nmarkers = {options['markers'][0]}\n"
    (tmp_path / "pytest.ini").write_text(ini)
    (tmp_path / "test_some.py").write_text(SLOW)
    done = run(tmp_path, "-p", "tests.slow", "-v", *marks, HISPARSE_PD_SLOW=slow)
    assert done.returncode == 0, done.stdout
    passed = [line.split()[0].partition("::")[2] for line in done.stdout.splitlines() if " PASSED" in line]
    assert sorted(passed) == ran
