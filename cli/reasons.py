"""Why a process ended, for `serve` that started it and says it last, after the output of all processes."""

import os
from collections.abc import Mapping

_VARIABLE = "HISPARSE_PD_REASON_FD"
_LONGEST = 4096
_to: list[int] = []
"""The file descriptor that this process leaves its reason in; none if nobody asked for it."""


class Reason:
    """Of one process. fd: for it to inherit. variables: for its environment."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("hisparse-pd-reason")

    @property
    def variables(self) -> Mapping[str, str]:
        return {_VARIABLE: str(self.fd)}

    def read(self) -> str:
        """What the process left; empty if nothing."""
        return os.pread(self.fd, _LONGEST, 0).decode(errors="replace")


def take_place() -> None:
    """Remember who started this process. Its own processes do not inherit that."""
    if (fd := os.environ.pop(_VARIABLE, None)) is not None:
        _to.append(int(fd))


def leave(reason: str) -> None:
    """Leave the reason for which this process ends."""
    for fd in _to:
        os.pwrite(fd, reason.encode()[:_LONGEST], 0)
