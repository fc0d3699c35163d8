"""How many files a process may open."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from service.limits import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("limits", [("300", "900"), ("900", "900")])
def test_the_limit_is_raised_to_what_is_allowed(limits: tuple[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *limits], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["900", "900"]
