"""Tests of Triton kernels on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def assert_passes_in_interpreter(name: str) -> None:
    """The tests of a file beside this one pass where Triton interprets kernels.

    In a process of its own, since importing a kernel decides whether it is interpreted.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_HERE / name)],
        cwd=_HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
