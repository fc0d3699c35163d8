"""Which skipped tests count as failed where all are to run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
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


@pytest.mark.parametrize(
    ("skips", "summary"),
    [("fail", "1 failed, 2 passed, 5 skipped, 2 xfailed, 2 errors"), ("", "2 passed, 8 skipped, 2 xfailed")],
)
def test_a_skipped_test_fails_unless_it_needs_a_gpu_or_is_impossible(tmp_path: Path, skips: str, summary: str) -> None:
    for directory in ("tests", "tests/gpu"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / f"test_{Path(directory).name}.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", "--rootdir", ".", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HISPARSE_PD_SKIPS": skips},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert summary in done.stdout.splitlines()[-1]
    assert done.returncode == (1 if skips else 0)
    assert ("must not be skipped here (HISPARSE_PD_SKIPS=fail). Skipped: needs root" in done.stdout) is bool(skips)
