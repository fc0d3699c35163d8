"""The limit of open files: a process without file descriptors accepts no connection and cannot log why."""

import resource

_ENOUGH = 1 << 16
"""Some systems allow a billion, and code that closes or scans all descriptors would take minutes."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, 65536 at most. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
