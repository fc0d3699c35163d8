"""The Triton kernels on a CPU, by Triton's interpreter: the tests of the files interpreted_*.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent

if importlib.util.find_spec("triton"):

    @pytest.mark.parametrize("program", sorted(path.name for path in _HERE.glob("interpreted_*.py")))
    def test_kernels_compute_the_same_in_tritons_interpreter(program: str) -> None:
        """In a process of its own, since importing a kernel decides whether it is interpreted."""
        pytest_options = ["-q", "-p", "no:cacheprovider", "-p", "tests.kernels.triton_interpreter"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *pytest_options, str(_HERE / program)],
            cwd=_HERE.parents[1],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-4000:]
