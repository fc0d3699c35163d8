"""How the ranks of one host agree on each step: a barrier in shared memory that a rank without work sleeps outside of.

A group computes step after step, in rounds. A rank that has requests posts how many and waits until all have posted;
that calls the others, which post, too. All of them then launch a step of the largest number, so that the collectives in
it match. A rank that nobody calls and that has no requests goes on without a step; after a while it sleeps, and the
rank that calls it rings its bell. Of a group on several hosts the table is a `LinkedTable`, and the rest is the same.

Two processes agree over gloo in 172 us and more, over shared memory in some 10.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from base.errors import ProcessFailed
from ranks.group_table import GroupTable, Standing

LINGER_S = 0.05
"""How long a rank without requests looks for the next call before it sleeps: longer than most steps take."""
_PAUSE_S = 50e-6
_LOOK_EVERY_S = 1e-3
"""How often a waiting rank looks for more than posts."""


class GroupFailed(ProcessFailed):
    """The group that this process is a rank of has failed: a rank ended, hung, or could not compute its step."""


@dataclass(frozen=True)
class Agreed:
    """What the ranks agreed on. batch: requests of the step that all launch now, padding included; 0: nobody steps.
    standing: that of the group."""

    batch: int
    standing: Standing


class Agreement:
    """One rank's part in the agreement. The node's loop uses it, on one thread.

    dead: names a rank that ended before the group agreed to, None while there is none. timeout: seconds that the others
    have to come. spin: seconds that this rank looks without a pause, which takes a core.
    """

    def __init__(
        self,
        table: GroupTable,
        rank: int,
        bells: tuple[int, ...],
        dead: Callable[[], int | None],
        timeout: float,
        spin: float = 0.0,
    ) -> None:
        """bells: an eventfd of each rank, which its watch listens to."""
        self._table = table
        self._rank = rank
        self._bells = bells
        self._dead = dead
        self._timeout = timeout
        self._spin = spin
        self._others = [other for other in range(table.size) if other != rank]
        self._stepped_at = -LINGER_S
        self.round = 0
        """The number of the last round that this rank came to, from 1."""

    @property
    def is_called(self) -> bool:
        """Whether another rank wants to step, or has ended."""
        return self._table.anybody_posted(self.round + 1) or self._dead() is not None

    def agree(self, batch: int) -> Agreed:
        """Whether the group steps, and in which size. batch: requests that this rank would compute.

        Waits for all ranks if any has requests, and for nobody otherwise. Raises GroupFailed if one has ended or does
        not come in time.
        """
        table = self._table
        table.set_asleep(self._rank, False)
        self._check()
        if not batch and not self.is_called:
            return Agreed(0, table.standing())
        self.round += 1
        table.post(self._rank, self.round, batch)
        largest = self._wait_for_all()
        self._stepped_at = time.monotonic()
        return Agreed(largest, table.standing())

    def linger(self, is_awaited: Callable[[], bool]) -> bool:
        """Call before a rank without work sleeps. Whether it is called or `is_awaited`, and should not sleep.

        Returns at once if the group has not stepped for a while. From then on a rank that calls this one rings.
        """
        until = self._stepped_at + LINGER_S
        while time.monotonic() < until:
            if self.is_called or is_awaited():
                return True
            time.sleep(_PAUSE_S)
        self._table.set_asleep(self._rank, True)
        # Who posted before it could see that has not rung.
        return self.is_called

    def _wait_for_all(self) -> int:
        """The most that any rank posted for this round, once all have."""
        started = time.monotonic()
        look_at = 0.0
        while (largest := self._table.largest_posted(self.round)) is None:
            now = time.monotonic()
            if now >= look_at:
                self._wake_and_check()
                look_at = now + _LOOK_EVERY_S
            if now - started > self._timeout:
                missing = next(other for other in self._others if self._table.posted(other, self.round) is None)
                raise GroupFailed(f"rank {missing} did not come to step {self.round} within {self._timeout:g} s")
            if now - started < self._spin:
                # The shortest sleep takes 50 us and more.
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)
        return largest

    def _wake_and_check(self) -> None:
        """Ring for those that sleep, again and again: one may have fallen asleep without seeing the post."""
        for other in self._others:
            if self._table.asleep(other):
                os.eventfd_write(self._bells[other], 1)
        self._check()

    def _check(self) -> None:
        if (dead := self._dead()) is not None:
            raise GroupFailed(f"rank {dead} ended")
