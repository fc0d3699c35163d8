"""`python -m tests.e2e.own_hosts ...`: `hisparse-pd ...` with a hosts file of its own, for tests in which names move.

The file named in the environment is mounted over /etc/hosts, for this process alone, which takes root. Writing to it
changes what names stand for while the process runs.
"""

import os
import subprocess
import sys
from pathlib import Path

MODULE = "tests.e2e.own_hosts"
_ENVIRONMENT = "HISPARSE_PD_HOSTS"
_UNSHARE = ["unshare", "--mount", "--propagation", "private"]


def environment(hosts: Path) -> dict[str, str]:
    return {_ENVIRONMENT: str(hosts)}


def possible() -> bool:
    """Whether this machine lets us mount."""
    command = [*_UNSHARE, "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    script = f'mount --bind "${_ENVIRONMENT}" /etc/hosts && exec "$@"'
    os.execvp("unshare", [*_UNSHARE, "sh", "-c", script, "sh", sys.executable, "-m", "cli.main", *sys.argv[1:]])
