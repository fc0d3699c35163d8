"""Where a process stands in its group, told by the process that started it. Imports nothing slow."""

import json
import os
import socket
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass

from ranks.status import SharedStatus

VARIABLE = "HISPARSE_PD_RANK"
NO_LINE = (-1, -1)


@dataclass(frozen=True)
class RankPlace:
    """Rank `rank` of `size`, with descriptors that all ranks of its host inherit.

    status: memory of a SharedStatus. store: an empty file by which ranks find each other. wakeup_fds: an eventfd of
    each rank.
    lines: two ends of a connection for every rank but 0, that of rank 0 and that rank's own; none if ranks need none.

    hosts: how many share the group, each with as many ranks, in order. meeting: HOST:PORT at which their ranks find
    each other. The lines between hosts are `NO_LINE`: `RankGroup.lines` has them.
    """

    rank: int
    size: int
    status: int
    store: int
    wakeup_fds: tuple[int, ...]
    lines: tuple[tuple[int, int], ...] = ()
    hosts: int = 1
    meeting: str = ""

    @property
    def per_host(self) -> int:
        """Ranks of one host."""
        return self.size // self.hosts

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.rank // self.per_host

    @property
    def neighbours(self) -> range:
        """The ranks of this host."""
        return range(self.host * self.per_host, (self.host + 1) * self.per_host)

    @property
    def counterparts(self) -> list[int]:
        """The rank of every other host that is as far from that host's first one as this rank is from its own."""
        at = self.rank % self.per_host
        return [rank for rank in range(at, self.size, self.per_host) if rank != self.rank]

    @property
    def descriptors(self) -> tuple[int, ...]:
        ends = (end for line in self.lines if line != NO_LINE for end in line)
        return (self.status, self.store, *self.wakeup_fds, *ends)

    def variables(self) -> dict[str, str]:
        """The environment variable that tells a process its place."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def taken(cls, environment: MutableMapping[str, str] = os.environ) -> "RankPlace | None":
        """The place of this process; None if it is in no group. Processes that it starts do not inherit the place."""
        text = environment.pop(VARIABLE, None)
        if text is None:
            return None
        values = json.loads(text)
        lines = tuple((first, own) for first, own in values["lines"])
        place = cls(**{**values, "wakeup_fds": tuple(values["wakeup_fds"]), "lines": lines})
        for descriptor in place.descriptors:
            os.set_inheritable(descriptor, False)
        return place


def create_places(size: int, lines: bool = False, hosts: int = 1, host: int = 0, meeting: str = "") -> list[RankPlace]:
    """The places of a new group on one of its hosts, whose descriptors the caller owns.

    size: ranks of all hosts. lines: whether rank 0 has one to each other. hosts, meeting: see RankPlace.
    """
    status, store = SharedStatus.create(size), os.memfd_create("hisparse-pd-store")
    wakeup_fds = tuple(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(size))
    first, per_host = host * (size // hosts), size // hosts
    ends = tuple(_line() if max(first, rank) < per_host else NO_LINE for rank in range(1, size if lines else 1))
    return [
        RankPlace(rank, size, status, store, wakeup_fds, ends, hosts, meeting)
        for rank in range(first, first + per_host)
    ]


def _line() -> tuple[int, int]:
    first, own = socket.socketpair()
    return first.detach(), own.detach()
