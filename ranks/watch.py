"""Each rank's watch over the group: a thread that wakes the loop, sees other ranks end, and ends a step that hangs.

The `Watchdog` of the process that started the ranks looks for what no rank can see: loops that no longer turn.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Iterable

import structlog

from ranks.status import SharedStatus

log = structlog.get_logger(__name__)

_LONGEST_BEAT_S = 0.5
_STOPPED_BEATS = 4
"""A rank without this number of beats is stopped, or its machine is."""
_STARTING_S = 2.0
"""After a rank of another host ended: how long a starting rank may take to end with a reason of its own."""


class RankWatch:
    """Waits for the wakeup_fd and for the ends of the other ranks, and shows that this process runs.

    A step is watched by a thread, since its own may wait in a collective for a rank that never comes, for which there
    is no time limit on a GPU. Nothing can be told to anyone then: the process ends.
    """

    def __init__(
        self,
        status: SharedStatus,
        rank: int,
        wakeup_fd: int,
        pids: tuple[int, ...],
        step_timeout: float,
        wake: Callable[[], None],
    ) -> None:
        """pids: of all ranks; 0: it is on another host. wake: has the loop take its next turn."""
        self._status = status
        self._rank = rank
        self._wakeup_fd = wakeup_fd
        self._step_timeout = step_timeout
        self._wake = wake
        self._beat_s = min(_LONGEST_BEAT_S, step_timeout / 8)
        self._far = [other for other, pid in enumerate(pids) if not pid]
        """Ranks of other hosts, whose end is reported in the status (`ReplicatedStatus`)."""
        self._dead: int | None = None
        self._ends: dict[int, int] = {}
        """Ranks of this host, by a pidfd of each."""
        for other, pid in enumerate(pids):
            if pid and other != rank:
                try:
                    self._ends[os.pidfd_open(pid)] = other
                except ProcessLookupError:
                    self._dead = other
        self._lost_at: float | None = None
        """When a rank of another host was found to have ended."""
        self._serving = False
        """The loop looks for dead ranks in every turn. Until then it may wait for one, in the libraries, for hours."""
        self.step = 0
        """The number of the last step that began."""
        self._step: tuple[int, float] | None = None
        """The number of the step that is under way and watched, and when it began."""
        self._seen = dict.fromkeys((other for other in range(len(pids)) if other != rank), (-1, 0.0))
        """Of each rank: its last beat, and when that was seen first."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def dead(self) -> int | None:
        """A rank that ended before all had agreed to; None if there is none."""
        dead = self._dead
        return None if dead is None or self._status.all_done() else dead

    def find_dead(self, patience: float) -> int | None:
        """Which rank ended, if one did or does within `patience` seconds: after a failed collective."""
        until = time.monotonic() + patience
        while self.dead() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.dead()

    def watch_steps(self) -> None:
        """From now on a step that takes longer than `step_timeout` ends the process."""
        self._serving = True

    def step_began(self, number: int) -> None:
        self.step = number
        if self._serving:
            self._step = number, time.monotonic()

    def step_ended(self) -> None:
        self._step = None

    def stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wakeup_fd, 1)
        self._thread.join()
        for pidfd in self._ends:
            os.close(pidfd)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._wakeup_fd, *self._ends):
            poll.register(descriptor, select.POLLIN)
        while not self._stopping:
            rung = poll.poll(self._beat_s * 1000)
            # First: if a rank of another host has ended, those of this host end because of it.
            self._look_at_far_ranks()
            for descriptor, _ in rung:
                if descriptor == self._wakeup_fd:
                    os.eventfd_read(self._wakeup_fd)
                else:
                    poll.unregister(descriptor)
                    if self._lost_at is None:
                        self._dead = self._ends[descriptor]
                self._wake()
            self._status.beat(self._rank)
            self._look_at_step()

    def _look_at_far_ranks(self) -> None:
        lost = self._status.first_reported(self._far)
        if lost is None or self._status.all_done():
            return
        if self._lost_at is None:
            self._dead, self._lost_at = lost, time.monotonic()
            self._wake()
        elif not self._serving and time.monotonic() - self._lost_at > _STARTING_S:
            self._give_up(f"rank {lost} ended while the group started")

    def _look_at_step(self) -> None:
        now = time.monotonic()
        for other, (beat, _) in self._seen.items():
            if (beats := self._status.beats(other)) != beat:
                self._seen[other] = beats, now
        step = self._step
        if step is not None and now - step[1] > self._step_timeout:
            self._step = None
            self._give_up(self._reason(step[0], now))

    def _reason(self, number: int, now: float) -> str:
        limit = f"step {number} did not end within {self._step_timeout:g} s"
        if (dead := self.dead()) is not None:
            return f"rank {dead} ended in step {number}"
        for other, (_, since) in self._seen.items():
            if now - since > _STOPPED_BEATS * self._beat_s:
                return f"rank {other} is stopped: {limit}"
        return f"rank {self._rank}: {limit}"

    def _give_up(self, reason: str) -> None:
        """End this process at once, whatever its other threads wait for. The process that started it says why."""
        log.critical("the group failed", reason=reason)
        self._status.report(self._rank, reason)
        os._exit(1)


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
