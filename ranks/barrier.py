"""The step barrier: the ranks of a group agree on the size of each step, and a rank without work sleeps outside of it.

A group computes step after step, in rounds. A rank that has requests posts how many and waits until all have posted;
that calls the others, which post, too. All of them then launch a step of the largest number, so that the collectives in
it match. A rank that nobody calls and that has no requests goes on without a step; after a while it sleeps, and the
rank that calls it writes to its wakeup_fd. Of a group on several hosts the status is a `ReplicatedStatus`, and the rest
is the same.

Two processes agree over gloo in 172 us and more, over shared memory in some 10.
"""

import os
import time
from collections.abc import Callable

from base.errors import ProcessFailed
from ranks.status import SharedStatus
from ranks.watch import RankWatch

SPIN_BEFORE_SLEEP_S = 0.05
"""How long a rank without requests looks for the next call before it sleeps: longer than most steps take."""
_PAUSE_S = 50e-6
_LOOK_EVERY_S = 1e-3
"""How often a waiting rank looks for more than posts."""


class GroupFailed(ProcessFailed):
    """The group that this process is a rank of has failed: a rank ended, hung, or could not compute its step."""


class StepBarrier:
    """One rank's side of the barrier before each step. The node's loop uses it, on one thread.

    This one is that of a process that steps alone.
    """

    def wait(self, batch: int) -> int:
        """The requests of the step that all ranks launch now, padding included; 0: nobody launches one.

        batch: requests that this rank would compute. Waits for all ranks if any has requests, and for nobody otherwise.
        The step is under way until the next call. Raises GroupFailed if a rank has ended or does not come in time.
        """
        return batch

    def spin_before_sleep(self, is_awaited: Callable[[], bool]) -> bool:
        """Call before a rank without work sleeps. Whether it is called or `is_awaited`, and should not sleep.

        Returns at once if the group has not stepped for a while. From then on a rank that calls this one wakes it.
        """
        return False


class GroupBarrier(StepBarrier):
    """That of a rank of a group."""

    def __init__(
        self,
        status: SharedStatus,
        rank: int,
        wakeup_fds: tuple[int, ...],
        watch: RankWatch,
        timeout: float,
        spin: float = 0.0,
    ) -> None:
        """wakeup_fds: an eventfd of each rank, which its watch listens to. timeout: seconds that the other ranks have
        to come. spin: seconds that this rank looks for them without a pause, which takes a core."""
        self._status = status
        self._rank = rank
        self._wakeup_fds = wakeup_fds
        self._watch = watch
        self._timeout = timeout
        self._spin = spin
        self._others = [other for other in range(status.size) if other != rank]
        self._stepped_at = -SPIN_BEFORE_SLEEP_S
        self.round = 0
        """The number of the last round that this rank came to, from 1."""

    @property
    def _is_called(self) -> bool:
        """Whether another rank wants to step, or has ended."""
        return self._status.anybody_posted(self.round + 1) or self._watch.dead() is not None

    def wait(self, batch: int) -> int:
        self._watch.step_ended()
        self._status.set_asleep(self._rank, False)
        self._check()
        if not batch and not self._is_called:
            self._status.turn(self._rank)
            return 0
        self.round += 1
        self._status.post(self._rank, self.round, batch)
        largest = self._wait_for_all()
        self._stepped_at = time.monotonic()
        # It may have waited for others as long as a step may take.
        self._status.turn(self._rank)
        if largest:
            self._watch.step_began(self.round)
        return largest

    def spin_before_sleep(self, is_awaited: Callable[[], bool]) -> bool:
        until = self._stepped_at + SPIN_BEFORE_SLEEP_S
        while time.monotonic() < until:
            if self._is_called or is_awaited():
                return True
            time.sleep(_PAUSE_S)
        self._status.set_asleep(self._rank, True)
        # Who posted before it could see that has not woken this rank.
        return self._is_called

    def _wait_for_all(self) -> int:
        """The most that any rank posted for this round, once all have."""
        started = time.monotonic()
        look_at = 0.0
        while (largest := self._status.largest_posted(self.round)) is None:
            now = time.monotonic()
            if now >= look_at:
                self._wake_and_check()
                look_at = now + _LOOK_EVERY_S
            for other in self._others if now - started > self._timeout else ():
                if self._status.posted(other, self.round) is None:
                    raise GroupFailed(f"rank {other} did not come to step {self.round} within {self._timeout:g} s")
            if now - started < self._spin:
                # The shortest sleep takes 50 us and more.
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)
        return largest

    def _wake_and_check(self) -> None:
        """Wake the sleeping ranks, again and again: one may have fallen asleep without seeing the post."""
        for other in self._others:
            if self._status.asleep(other):
                os.eventfd_write(self._wakeup_fds[other], 1)
        self._check()

    def _check(self) -> None:
        if (dead := self._watch.dead()) is not None:
            raise GroupFailed(f"rank {dead} ended")
