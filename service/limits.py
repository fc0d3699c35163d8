"""What the system allows a process."""

import resource

OPEN_FILES = 65536


def raise_open_files() -> None:
    """Let this process have as many files open as it may, or OPEN_FILES.

    Shells and service managers start with 1024. Every connection is one, whoever makes it, and a process that has no
    more can neither be reached nor reach others until some are closed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
