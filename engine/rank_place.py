"""Where a process stands in its group, told by the process that started it. Imports nothing slow."""

import json
import os
import socket
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass

from engine.group_table import GroupTable

VARIABLE = "HISPARSE_PD_RANK"


@dataclass(frozen=True)
class RankPlace:
    """Rank `rank` of `size` on one host, with descriptors that all of them inherit.

    table: memory of a GroupTable. store: an empty file by which ranks find each other. bells: an eventfd of each rank.
    lines: two ends of a connection for every rank but 0, that of rank 0 and that rank's own; none if ranks need none.
    """

    rank: int
    size: int
    table: int
    store: int
    bells: tuple[int, ...]
    lines: tuple[tuple[int, int], ...] = ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.table, self.store, *self.bells, *(end for line in self.lines for end in line))

    def variables(self) -> dict[str, str]:
        """The environment variable that tells a process its place."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def taken(cls, environment: MutableMapping[str, str] = os.environ) -> "RankPlace | None":
        """The place of this process; None if it is in no group. What it starts itself does not inherit it."""
        text = environment.pop(VARIABLE, None)
        if text is None:
            return None
        values = json.loads(text)
        lines = tuple((first, own) for first, own in values["lines"])
        place = cls(**{**values, "bells": tuple(values["bells"]), "lines": lines})
        for descriptor in place.descriptors:
            os.set_inheritable(descriptor, False)
        return place


def create_places(size: int, lines: bool = False) -> list[RankPlace]:
    """The places of a new group, whose descriptors the caller owns. lines: whether rank 0 has one to each other."""
    table, store = GroupTable.create(size), os.memfd_create("hisparse-pd-store")
    bells = tuple(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(size))
    pairs = [socket.socketpair() for _ in range(1, size if lines else 1)]
    ends = tuple((first.detach(), own.detach()) for first, own in pairs)
    return [RankPlace(rank, size, table, store, bells, ends) for rank in range(size)]
