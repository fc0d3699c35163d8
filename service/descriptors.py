"""File descriptors: each connection takes one, and a process that has none left can neither serve nor tell."""

import resource

_ENOUGH = 1 << 16
"""Some systems allow a thousand million, and code that closes or scans them all would take minutes."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files as far as it goes, to 65536 at most. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
