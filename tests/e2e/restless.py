"""`python -m tests.e2e.restless decode ...`: a process of the service whose rows become resident often.

Fills begin soon after hot slots were short, and take several turns although contexts are short.
"""

import sys

from cli.main import main as run_command
from hisparse import filling, resident_rows

MODULE = "tests.e2e.restless"


def main(words: list[str]) -> None:
    resident_rows._CALM_STEPS = 8
    filling._PART_BYTES = 100_000
    run_command(words)


if __name__ == "__main__":
    main(sys.argv[1:])
