"""`python -m tests.e2e.next_version prefill|decode|gateway ...`: a process of the next wire version."""

import sys

from control import codec

MODULE = "tests.e2e.next_version"

if __name__ == "__main__":
    # Before others import it. `encode` has it as a default, too.
    codec.PROTOCOL_VERSION += 1
    codec.encode.__defaults__ = ("", codec.PROTOCOL_VERSION)
    from cli.main import main

    sys.exit(main(sys.argv[1:]))
