"""The ranks of a node: processes that step together, each with a part of the experts. One alone is a `SingleRank`.

Nodes use `Ranks` and its `StepBarrier`, and do not ask how many ranks there are.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed as dist

from base.errors import StartupError
from base.phase import Phase
from model.shard import NO_EXCHANGE, Exchange, Shard
from ranks.barrier import GroupBarrier, GroupFailed, StepBarrier
from ranks.exchange import GroupExchange
from ranks.place import RankPlace
from ranks.rendezvous import MEETING_S, meet
from ranks.sealed_socket import SealedSocket
from ranks.status import ReplicatedStatus, SharedStatus
from ranks.watch import RankWatch

log = structlog.get_logger(__name__)

_LOADING = timedelta(hours=2)
"""How long ranks wait for each other before they serve: weights may be on a slow disk. Who started them sees that one
ends."""
_SPIN_S = 2e-3
_FIND_DEAD_S = 0.5
_LEAVE_S = 3.0


class Ranks:
    """This process's side of the ranks of its node. The node's loop uses it, on one thread.

    Life: made before the model is loaded; `check_same_config`; `connect`; `share` between stages of the start;
    `watch_steps` once steps have been warmed up; `sync_phase` in every turn of the loop; `close`.

    One rank's end is the end of all (`GroupFailed`), since their collectives would wait for it. They end in peace when
    each has said `done`. The methods here are those of a process that has no other ranks.

    rank: of this process, from 0. per_host: ranks of this host, which share its memory. clock_ahead: seconds by which
    rank 0's monotonic clock is ahead of this rank's: on another host it is another clock. lines: to other ranks, by
    rank; empty if ranks need none.
    """

    rank = 0
    world_size = 1
    per_host = 1
    clock_ahead = 0.0
    barrier = StepBarrier()
    lines: Mapping[int, SealedSocket] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.world_size)

    # --- starting ---

    def share(self, value: Any) -> list[Any]:
        """What each rank says, in their order. value: of this rank, which JSON can hold. Waits for all of them."""
        return [value]

    def share_on_host(self, value: Any) -> list[Any]:
        """What the ranks of this host say, as `share`; all ranks have to call it."""
        first = self.rank // self.per_host * self.per_host
        return self.share(value)[first : first + self.per_host]

    def check_same_config(self, values: Mapping[str, object]) -> None:
        """Raises StartupError if other ranks have other values, with the first that differs."""

    def connect(self) -> Exchange:
        """Connect the ranks for collectives. Waits for all of them."""
        return NO_EXCHANGE

    def watch_steps(self) -> None:
        """From now on a step, or a turn of the loop, that takes longer than the step timeout ends all ranks.

        Waits for all of them. Every turn has to call `sync_phase`.
        """

    # --- stepping ---

    def begin_step(self) -> None:
        """A step that rank 0 has planned, without a barrier, is under way in this rank."""

    def end_step(self) -> None:
        """The step that `begin_step` began is over."""

    def check(self) -> None:
        """Raises GroupFailed if a rank has ended, or what connects the ranks has failed."""

    def fail(self, reason: str) -> None:
        """What connects the ranks has failed: the next `check` says so. Any thread may call it."""

    def failure(self, error: Exception) -> Exception:
        """What to raise for an error in the forward pass of a step: the error, or GroupFailed if other ranks wait for
        this one in the step, or if one of them has ended."""
        return error

    def report(self, reason: str) -> None:
        """Tell the process that started the ranks why they end, and have it end them: the device of this one may never
        finish what is queued."""

    # --- leaving ---

    def sync_phase(self, phase: Phase) -> Phase:
        """Say that the loop turns and the phase of this rank. Returns that of the group: the latest of any rank."""
        return phase

    def done(self) -> bool:
        """Say that this rank asks for no more steps. Returns whether none does: then all may end."""
        return True

    def leave(self) -> None:
        """Say that this rank is done, and wait a while for the others to say so."""
        until = time.monotonic() + _LEAVE_S
        while not self.done() and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Leave the ranks. Collectives must be over, or the process about to end."""


class SingleRank(Ranks):
    """A node that is one process."""


class RankGroup(Ranks):
    """A process that is one of several ranks."""

    def __init__(
        self,
        place: RankPlace,
        device: torch.device,
        step_timeout: float,
        wake: Callable[[], None],
        secret: bytes = b"",
        patience: float = MEETING_S,
    ) -> None:
        """wake: has the loop take its next turn, from any thread. secret, patience: see `meet`."""
        super().__init__(device)
        met = meet(place, secret, patience)
        self.place = place
        self.lines = met.lines
        self.rank, self.world_size, self.per_host = place.rank, place.size, place.per_host
        self._wake = wake
        self._broken: str | None = None
        self.clock_ahead = met.clock_ahead
        self._interface = met.interface
        self._step_timeout = step_timeout
        self._status = (
            ReplicatedStatus(place.status, place.size, place.rank, met.links, called=wake, lost=self._wake_all)
            if met.links
            else SharedStatus(place.status, place.size)
        )
        self._store = dist.PrefixStore("ranks", met.store)  # type: ignore[attr-defined]
        self._store.set_timeout(_LOADING)
        self._stages = 0
        self._exchange: GroupExchange | None = None
        pids = [pid if rank in place.neighbours else 0 for rank, pid in enumerate(self.share(os.getpid()))]
        self._watch = RankWatch(
            self._status,
            self.rank,
            place.wakeup_fds[self.rank],
            tuple(pids),
            step_timeout,
            wake,
        )
        self.barrier = GroupBarrier(self._status, self.rank, place.wakeup_fds, self._watch, step_timeout, self._spin())

    def share(self, value: Any) -> list[Any]:
        self._stages += 1
        name = f"stage-{self._stages}"
        everybody = range(self.world_size)
        try:
            self._store.set(f"{name}/{self.rank}", json.dumps(value))
            shared = [json.loads(self._store.get(f"{name}/{rank}")) for rank in everybody]
            if self.place.hosts > 1:
                self._store.set(f"{name}/read/{self.rank}", "")
                # The store is in the process of rank 0, which may end next: over what it just heard.
                for rank in everybody if self.rank == 0 else ():
                    self._store.get(f"{name}/read/{rank}")
        except dist.DistError as error:
            raise GroupFailed(f"rank 0 ended: its store does not answer any more: {error}") from error
        return shared

    def check_same_config(self, values: Mapping[str, object]) -> None:
        first = dict(values)
        for rank, theirs in enumerate(self.share(first)):
            for name in first.keys() | theirs.keys():
                if theirs.get(name) != json.loads(json.dumps(first.get(name))):
                    raise StartupError(
                        f"rank {rank} has {name} {theirs.get(name)}, rank {self.rank} has {first.get(name)}: "
                        "all ranks of a group need the same"
                    )

    def connect(self) -> Exchange:
        store = dist.PrefixStore("collectives", self._store)  # type: ignore[attr-defined]
        self._exchange = GroupExchange.connect(
            store, self.rank, self.world_size, self.device, self._interface, _LOADING
        )
        log.info("connected to the group", rank=self.rank, of=self.world_size, backend=dist.get_backend())
        return self._exchange

    def watch_steps(self) -> None:
        self.share(None)
        self._status.turn(self.rank)
        self._watch.watch_steps()
        self._status.be_patient(self._step_timeout)

    def begin_step(self) -> None:
        self._watch.step_began(self._watch.step + 1)

    def end_step(self) -> None:
        self._watch.step_ended()

    def check(self) -> None:
        if self._broken is not None:
            raise GroupFailed(self._broken)
        if (dead := self._watch.dead()) is not None:
            raise GroupFailed(f"rank {dead} ended")

    def fail(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._wake()

    def failure(self, error: object) -> GroupFailed:
        step = self._watch.step
        if (dead := self._watch.find_dead(_FIND_DEAD_S)) is not None:
            return GroupFailed(f"rank {dead} ended in step {step}")
        return GroupFailed(f"rank {self.rank} failed in step {step}: {error}")

    def report(self, reason: str) -> None:
        self._status.report(self.rank, reason)

    def sync_phase(self, phase: Phase) -> Phase:
        self._status.turn(self.rank)
        self._status.set_phase(self.rank, phase)
        return self._status.phase()

    def done(self) -> bool:
        self._status.set_done(self.rank)
        return self._status.all_done()

    def close(self) -> None:
        self._watch.stop()
        self._status.leave()
        if self._exchange is not None and self._status.all_done():
            self._exchange.close()

    def _wake_all(self) -> None:
        """Have the watches of all ranks of this host look at the status."""
        for rank in self.place.neighbours:
            os.eventfd_write(self.place.wakeup_fds[rank], 1)

    def _spin(self) -> float:
        """A rank with a core to itself looks for the others without a pause, as long as they differ by usually."""
        cores = len(os.sched_getaffinity(0))
        return _SPIN_S if self.device.type == "cuda" and cores >= self.per_host else 0.0
