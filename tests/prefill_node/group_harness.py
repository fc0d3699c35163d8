"""A prefill node of several ranks in one process: each computes, sends and fetches with a pool of its own."""

import os
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from engine.chunked import ChunkedPrefill
from kvcache.paged_pool import PagedKVPool
from model.shard import Shard
from prefill_node.fetcher import FetchResources
from prefill_node.job import TransferJob
from prefill_node.landing import HostSink
from prefill_node.model_engine import EngineParts, ModelEngine
from prefill_node.ranks.follower import Follower
from prefill_node.ranks.gathering import PrefixGather
from prefill_node.ranks.leader import GroupEngine
from prefill_node.ranks.orders import End
from prefill_node.ring import SendRings
from prefill_node.sender import SendResources
from prefill_node.source import HostSource, Reading
from ranks.barrier import GroupFailed
from ranks.place import RankPlace, create_places
from ranks.rank_line import inherited_lines
from tests.prefill_node.fakes import LAYOUT, FakeControl
from tests.prefill_node.sending import CPU, LateChannel
from tests.prefill_node.sequences import RunningModel
from tests.prefill_node.test_fetch import Fetching

RANKS = 3
Gather = Callable[[torch.Tensor], torch.Tensor]


class ThreadExchange:
    """Gathers what as many threads bring."""

    def __init__(self, size: int) -> None:
        self.gathers = 0
        """Rounds that were completed."""
        self._brought: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=10)

    def of(self, rank: int) -> Gather:
        def gather(rows: torch.Tensor) -> torch.Tensor:
            self._brought[rank] = rows
            if self._barrier.wait() == 0:
                self.gathers += 1
            gathered = torch.cat(self._brought)
            self._barrier.wait()
            return gathered

        return gather


class FakeRank:
    """A rank's side of the group."""

    def __init__(self, place: RankPlace, size: int) -> None:
        self.place, self.rank, self.world_size = place, place.rank, size
        self.lines = inherited_lines(place)
        self.clock_ahead = 0.0
        self.ended: int | None = None

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.world_size)

    def check(self) -> None:
        if self.ended is not None:
            raise GroupFailed(f"rank {self.ended} ended")

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)

    def failure(self, error: object) -> GroupFailed:
        return GroupFailed(f"rank {self.rank} failed: {error}")

    def begin_step(self) -> None:
        pass

    def end_step(self) -> None:
        pass


class OtherRank:
    """A rank other than 0, whose loop is a thread."""

    def __init__(self, node: "GroupFetching", place: RankPlace) -> None:
        self.model = RunningModel()
        self.pool = PagedKVPool(LAYOUT, node.pool.num_pages, node.pool.page_size, CPU)
        self.reads = LateChannel("tcp")
        self.connect_reads: Callable[[], LateChannel] = lambda: self.reads
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failed: GroupFailed | None = None
        layers = [*self.pool.kv, *self.pool.index_keys]
        ranks = FakeRank(place, node.size)
        prefill: ChunkedPrefill[TransferJob] = ChunkedPrefill(self.model, self.pool, 32)  # type: ignore[arg-type]
        self.follower = Follower(
            SimpleNamespace(control=FakeControl(), inbox=self.inbox),  # type: ignore[arg-type]
            prefill,
            CPU,
            SendResources(
                reading=Reading(HostSource(layers), LAYOUT.layer_of_buffer, self.pool.page_size, "full"),
                rings=SendRings(pin=False, register=lambda _: None),
                connect=lambda _: LateChannel("tcp"),
                silence=lambda _: 0.0,
            ),
            FetchResources(
                connect=lambda _: self.connect_reads(),
                silence=lambda _: 0.0,
                new_sink=lambda: HostSink(layers),
                page_size=self.pool.page_size,
            ),
            PrefixGather(self.pool, place.rank, node.exchange.of(place.rank), lambda: None, node.most_rows),
            ranks,  # type: ignore[arg-type]
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.follower._ended:
                self.follower._take(self.inbox.get())
        except GroupFailed as error:
            self.failed = error

    def close(self) -> None:
        self.inbox.put(End())
        self.thread.join(10)
        self.follower._compute.stop(5)
        assert not self.thread.is_alive()


class GroupFetching(Fetching):
    """Ranks that lack what their decode node has. It hashes 24 positions together, so the last group has 8."""

    digested_together = 24
    most_rows = 30

    def __init__(self, size: int = RANKS) -> None:
        self.size = size
        self.exchange = ThreadExchange(size)
        self._places = create_places(size, lines=True)
        self.rank = FakeRank(self._places[0], size)
        super().__init__()
        self.others = [OtherRank(self, place) for place in self._places[1:]]

    def new_engine(self, parts: EngineParts) -> ModelEngine:
        gather = PrefixGather(parts.prefill.pool, 0, self.exchange.of(0), lambda: None, self.most_rows)
        return GroupEngine(parts, self.rank, gather)  # type: ignore[arg-type]

    @property
    def bytes_read(self) -> list[int]:
        """By each rank."""
        channels = [self.reads, *(other.reads for other in self.others)]
        return [sum(int(batch.lengths.sum()) for batch in channel.posted) for channel in channels]

    def close(self) -> None:
        self.engine.close(timeout=5)
        for other in self.others:
            other.close()
        place = self._places[0]
        for descriptor in (place.status, place.store, *place.wakeup_fds):
            os.close(descriptor)
