"""A rank's group: processes of one node that step together, each with its own requests and a part of the experts."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed as dist

from base.errors import StartupError
from model.shard import ALONE, WHOLE, Exchange, Shard
from ranks.agreement import Agreed, Agreement, GroupFailed
from ranks.far_ranks import MEETING_S, FarRanks, meet
from ranks.group_exchange import GroupExchange
from ranks.group_table import GroupTable, Standing
from ranks.linked_table import LinkedTable
from ranks.rank_line import inherited_lines
from ranks.rank_place import RankPlace
from ranks.rank_watch import RankWatch, end_process
from ranks.sealed_socket import SealedSocket

log = structlog.get_logger(__name__)

_LOADING = timedelta(hours=2)
"""How long ranks wait for each other before they serve: weights may be on a slow disk. Who started them sees that one
ends."""
_SPIN_S = 2e-3
_FIND_DEAD_S = 0.5
_LEAVE_S = 3.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Of the libraries: the network interface over which ranks find each other."""
_SETTINGS = {
    # Multicast over NVLink takes resources of the whole host, and gains nothing for the few rows of a step.
    "NCCL_NVLS_ENABLE": "0",
    # It would write to buffers of the graph that the peer recorded together with this one; ranks may replay different
    # ones, since their contexts differ.
    "NCCL_GRAPH_REGISTER": "0",
}
"""Settings of the libraries, where the environment does not say otherwise."""


class RankGroup:
    """This process's side of its group: what the ranks agree on, and what they exchange.

    Life: made before the model is loaded; `check_same_config`; `connect`; `share` between stages of the start;
    `watch_steps` once steps have been warmed up; `close`. The node's loop uses it, on one thread.

    One rank's end is the end of all (`GroupFailed`), since their collectives would wait for it. They end in peace when
    each has said `done`.
    """

    def __init__(
        self,
        place: RankPlace,
        device: torch.device,
        step_timeout: float,
        wake: Callable[[], None],
        secret: bytes = b"",
        patience: float = MEETING_S,
    ) -> None:
        """wake: has the loop take its next turn, from any thread. secret, patience: see `meet`; not for one host."""
        self._far = meet(place, secret, patience) if place.hosts > 1 else None
        self.place = place
        self.lines = inherited_lines(place) | ({} if self._far is None else self._far.lines)
        """To the other ranks, by rank: of rank 0 to all, of others to rank 0. Empty if ranks need none."""
        self._broken: str | None = None
        self.rank, self.size = place.rank, place.size
        self.device = device
        self._step_timeout = step_timeout
        self._wake = wake
        self._table = self._own_table(self._far)
        self._store = dist.PrefixStore("ranks", self._own_store(self._far))  # type: ignore[attr-defined]
        self._store.set_timeout(_LOADING)
        self._stages = 0
        self._watching_steps = False
        self._planned = 0
        """Steps that rank 0 has planned for the group; in a group that agrees on steps there are none."""
        self._group: dist.ProcessGroup | None = None
        self._table.set_pid(self.rank, os.getpid())
        self.share(None)
        self._watch = RankWatch(
            self._table,
            self.rank,
            place.bells[self.rank],
            tuple(map(self._table.pid, range(self.size))),
            step_timeout,
            wake,
            lambda reason: end_process(self._table, self.rank, reason),
        )
        self._agreement = Agreement(
            self._table, self.rank, place.bells, self._watch.dead, step_timeout, self._spin(device)
        )

    @property
    def world_size(self) -> int:
        return self.size

    @property
    def per_host(self) -> int:
        """Ranks of this host, which share its memory."""
        return self.place.per_host

    @property
    def clock_ahead(self) -> float:
        """Seconds by which rank 0's monotonic clock is ahead of this rank's: on another host it is another clock."""
        return 0.0 if self._far is None else self._far.clock_ahead

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.size)

    # --- starting ---

    def share(self, value: Any) -> list[Any]:
        """What each rank says, in their order. value: of this rank, which JSON can hold. Waits for all of them."""
        self._stages += 1
        name = f"stage-{self._stages}"
        if self._far is None:
            return self._exchanged(name, value)
        try:
            shared = self._exchanged(name, value)
            self._store.set(f"{name}/read/{self.rank}", "")
            # The store is in the process of rank 0, which may end next: over what it just heard.
            for rank in range(self.size if self.rank == 0 else 0):
                self._store.get(f"{name}/read/{rank}")
        except dist.DistError as error:
            raise GroupFailed(f"rank 0 ended: its store does not answer any more: {error}") from error
        return shared

    def share_on_host(self, value: Any) -> list[Any]:
        """What the ranks of this host say, as `share`; all ranks of the group have to call it."""
        shared = self.share(value)
        return [shared[rank] for rank in self.place.neighbours]

    def check_same_config(self, values: Mapping[str, object]) -> None:
        """Raises StartupError if other ranks have other values, with the first that differs."""
        first = dict(values)
        for rank, theirs in enumerate(self.share(first)):
            for name in first.keys() | theirs.keys():
                if theirs.get(name) != json.loads(json.dumps(first.get(name))):
                    raise StartupError(
                        f"rank {rank} has {name} {theirs.get(name)}, rank {self.rank} has {first.get(name)}: "
                        "all ranks of a group need the same"
                    )

    def connect(self) -> Exchange:
        """Connect the ranks for collectives: NCCL on GPUs, gloo on CPUs. Waits for all of them."""
        interface = "lo" if self._far is None else self._far.interface
        interfaces = dict.fromkeys(_INTERFACES, interface) if interface else {}
        for name, value in {**interfaces, **_SETTINGS}.items():
            os.environ.setdefault(name, value)
        on_gpu = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("collectives", self._store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.size,
            timeout=_LOADING,
            device_id=self.device if on_gpu else None,
        )
        self._group = dist.group.WORLD
        log.info("connected to the group", rank=self.rank, of=self.size, backend=dist.get_backend())
        return GroupExchange(self.rank, self.size)

    def watch_steps(self) -> None:
        """From now on a step, or a turn of the loop, that takes longer than `step_timeout` ends the group.

        Waits for all ranks. Every turn has to call `stand`.
        """
        self.share(None)
        self._table.turn(self.rank)
        self._watching_steps = self._watch.serving = True
        if isinstance(self._table, LinkedTable):
            self._table.be_patient(self._step_timeout)

    # --- stepping ---

    def agree(self, batch: int) -> Agreed:
        """See Agreement.agree. From then until the next call the step is under way."""
        self._watch.step_ended()
        agreed = self._agreement.agree(batch)
        # It may have waited for others as long as a step may take.
        self._table.turn(self.rank)
        if agreed.batch and self._watching_steps:
            self._watch.step_began(self._agreement.round)
        return agreed

    def linger(self, is_awaited: Callable[[], bool]) -> bool:
        """See Agreement.linger."""
        return self._agreement.linger(is_awaited)

    def begin_step(self) -> None:
        """A step of the group, which rank 0 has planned, is under way in this rank."""
        self._planned += 1
        if self._watching_steps:
            self._watch.step_began(self._planned)

    def end_step(self) -> None:
        """The step that `begin_step` began is over."""
        self._watch.step_ended()

    def check(self) -> None:
        """Raises GroupFailed if a rank has ended, or what connects the ranks has failed."""
        if self._broken is not None:
            raise GroupFailed(self._broken)
        if (dead := self._watch.dead()) is not None:
            raise GroupFailed(f"rank {dead} ended")

    def fail(self, reason: str) -> None:
        """What connects the ranks has failed: the next `check` says so. Any thread may call it."""
        self._broken = self._broken or reason
        self._wake()

    def failure(self, error: object) -> GroupFailed:
        """What to raise for an error in the forward pass of a step: the other ranks wait for this one, or one ended."""
        number = self._planned or self._agreement.round
        if (dead := self._watch.find_dead(_FIND_DEAD_S)) is not None:
            return GroupFailed(f"rank {dead} ended in step {number}")
        return GroupFailed(f"rank {self.rank} failed in step {number}: {error}")

    def report(self, reason: str) -> None:
        """Tell the process that started the ranks why they end, and have it end them: this one's device may never
        finish what is queued."""
        self._table.report(self.rank, reason)

    # --- leaving ---

    def stand(self, standing: Standing) -> Standing:
        """Say that the loop turns and how far this rank is, and hear how far the group is."""
        self._table.turn(self.rank)
        self._table.set_standing(self.rank, standing)
        return self._table.standing()

    def done(self) -> bool:
        """Say that this rank asks for no more steps, and hear whether none does: then all may end."""
        self._table.set_done(self.rank)
        return self._table.all_done()

    def leave(self) -> None:
        """Say that this rank is done, and wait a while for the others to say so."""
        until = time.monotonic() + _LEAVE_S
        while not self.done() and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Leave the group. Its collectives must be over, or the process about to end."""
        self._watch.stop()
        if isinstance(self._table, LinkedTable):
            self._table.leave()
        # NCCL would wait until the recorded steps that use it are destroyed. It ends with the process.
        if self._group is not None and self.device.type == "cpu" and self._table.all_done():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    # --- of one host, or of several ---

    def _own_table(self, far: FarRanks | None) -> GroupTable:
        place = self.place
        if far is None:
            return GroupTable(place.table, place.size)
        return LinkedTable(place.table, place, far.links, called=self._wake, lost=self._ring_all)

    def _own_store(self, far: FarRanks | None) -> Any:
        if far is not None:
            return far.store
        return dist.FileStore(f"/proc/self/fd/{self.place.store}", self.size)  # type: ignore[attr-defined]

    def _ring_all(self) -> None:
        """Have the watches of all ranks of this host look at the table."""
        for rank in self.place.neighbours:
            os.eventfd_write(self.place.bells[rank], 1)

    def _exchanged(self, name: str, value: Any) -> list[Any]:
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self.size)]

    def _spin(self, device: torch.device) -> float:
        """A rank with a core to itself looks for the others without a pause, as long as they differ by usually."""
        cores = len(os.sched_getaffinity(0))
        return _SPIN_S if device.type == "cuda" and cores >= self.per_host else 0.0


class SingleRank:
    """The group of a node of one process, which waits for nobody."""

    rank, world_size, per_host = 0, 1, 1
    clock_ahead = 0.0
    lines: Mapping[int, SealedSocket] = {}
    shard = WHOLE

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def share(self, value: Any) -> list[Any]:
        return [value]

    def check_same_config(self, values: Mapping[str, object]) -> None: ...

    def connect(self) -> Exchange:
        return ALONE

    def watch_steps(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def check(self) -> None: ...

    def fail(self, reason: str) -> None: ...

    def failure(self, error: object) -> GroupFailed:
        return GroupFailed(f"rank 0 failed: {error}")

    def report(self, reason: str) -> None: ...

    def stand(self, standing: Standing) -> Standing:
        return standing

    def done(self) -> bool:
        return True

    def leave(self) -> None: ...

    def close(self) -> None: ...


Ranks = RankGroup | SingleRank
"""The ranks of a node, which does not ask how many there are."""
