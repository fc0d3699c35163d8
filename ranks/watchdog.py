"""Finds a rank that hangs although no other rank waits for it: its process is stopped, or its loop is stuck.

The process that started the ranks of a host uses it. That process sees all of them, also if all hang or if there is
only one. What ranks see of each other is the work of `RankWatch`.
"""

from collections.abc import Iterable

from ranks.status import SharedStatus

GRACE_S = 2.0
"""How long a rank may hang beyond the step timeout: ranks that wait for it notice it first, and know in which step."""


class Watchdog:
    """Counts how often the loops of some ranks turn (`SharedStatus.turn`).

    Time counts only as far as this process looks: while the whole machine was paused no loop could turn.
    """

    def __init__(self, status: SharedStatus, ranks: Iterable[int], step_timeout: float, look_every: float) -> None:
        """look_every: seconds between calls of `look` at most, as long as nothing is paused."""
        self.patience = step_timeout + GRACE_S
        self._status = status
        self._look_every = look_every
        self._looked_at: float | None = None
        self._still = dict.fromkeys(ranks, (0, 0.0))
        """Of each rank: how often its loop had turned, and for how many seconds that has been so."""

    def look(self, now: float) -> int | None:
        """A rank whose loop has not turned for `patience` seconds; None if there is none. now: of time.monotonic().

        Ranks that have not begun to serve, which may take hours, or that are done are not expected to turn.
        """
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * self._look_every)
        self._looked_at = now
        for rank, (before, still) in self._still.items():
            turns = self._status.turns(rank)
            is_still = turns == before and turns > 0 and not self._status.done(rank)
            self._still[rank] = turns, still + passed if is_still else 0.0
        return next((rank for rank, (_, still) in self._still.items() if still > self.patience), None)
