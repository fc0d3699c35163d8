"""The engine of rank 0 of a prefill node: plans steps for all ranks, and counts the writes of all as its own."""

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

from control.messages import AttemptId, Peer, PrefillRequest
from engine.chunked import PrefillStep
from model.shard import Shard
from prefill_node.compute import Computed, StepCompute
from prefill_node.engine import PrefillUpdate
from prefill_node.fetch import FetchReport
from prefill_node.job import JobState, TransferJob
from prefill_node.model_engine import EngineParts, ModelEngine
from prefill_node.outgoing import Chunk, SendReport
from prefill_node.progress import ForwardProgress
from prefill_node.ranks.fetcher import GroupFetcher, ReadPrefix
from prefill_node.ranks.gathering import Gathered, PrefixGather
from prefill_node.ranks.order_codec import OF_FIRST
from prefill_node.ranks.orders import (
    Begin,
    Connected,
    End,
    Forget,
    Gather,
    Order,
    PartRead,
    PartSent,
    PlannedChunk,
    Step,
    Stop,
)
from prefill_node.ranks.parts import Part, PartialReports
from prefill_node.sender import ChunkSender
from ranks.barrier import GroupFailed
from ranks.group import RankGroup
from ranks.rank_line import lines_to_others


class GroupEngine(ModelEngine):
    """A ModelEngine of which every step is computed, and every chunk sent, by all ranks.

    It alone allocates pages. A chunk is one for the jobs: its report comes when every rank has reported its block, so
    nothing is announced, or said to be out of flight, before all ranks have said so.

    A fetch is one, too. When every rank has its block, all ranks exchange them in a step of its own, a *gather*, and
    only then the fetch has ended for its job.
    """

    def __init__(self, parts: EngineParts, ranks: RankGroup, gather: PrefixGather) -> None:
        super().__init__(parts)
        self._ranks = ranks
        self._said: queue.SimpleQueue[tuple[int, PartSent | PartRead | Gathered]] = queue.SimpleQueue()
        """What ranks have said of their parts, and this one of a gather, that the loop has not counted yet."""
        self._failure: GroupFailed | None = None
        self._said_failure = False
        self._connected: frozenset[str] = frozenset()
        self._lines = lines_to_others(ranks.lines, OF_FIRST, self._on_part, ranks.fail)
        self._partial = PartialReports()
        layouts: WeakKeyDictionary[ForwardProgress, Layout] = WeakKeyDictionary()
        self._compute = GroupCompute(self._compute, ranks.world_size, layouts, self._order)
        self._sender = GroupSender(self._sender, layouts, self._partial)
        self._gather = gather
        self._steps_ended = 0
        """Steps and gathers."""
        self._fetcher = GroupFetcher(self._fetches.fetcher, ranks.world_size, self._order_to, lambda: self._steps_ended)
        self._fetches.fetcher = self._fetcher
        self._to_gather: list[ReadPrefix] = []
        """What every rank has its block of. It is in flight for its job."""
        self._gathering: list[FetchReport] = []
        """Of what is being gathered."""

    # --- PrefillEngine ---

    def start(self, decode: Peer, request: PrefillRequest) -> None:
        self._order(Begin(decode, request))
        super().start(decode, request)

    def stop(self, attempt: AttemptId, reason: str | None = None) -> bool:
        if attempt in self._jobs:
            self._order(Stop(attempt))
        return super().stop(attempt, reason)

    def poll(self) -> list[PrefillUpdate]:
        """See PrefillEngine. Raises GroupFailed, once, if a rank has ended or could not compute its part."""
        if not self._said_failure:
            try:
                self._ranks.check()
                if self._failure is not None:
                    raise self._failure
            except GroupFailed:
                self._said_failure = True
                raise
        while not self._said.empty():
            self._take(*self._said.get())
        self._drop_unwanted()
        updates = super().poll()
        self._fetcher.stop_what_is_not_wanted()
        return updates

    def keep_connected(self, decode_nodes: set[Peer]) -> None:
        super().keep_connected(decode_nodes)
        connected = frozenset(decode.boot_id for decode in decode_nodes)
        if connected != self._connected:
            self._connected = connected
            self._order(Connected(connected))

    def leave(self) -> None:
        """The node ends in peace: tell the other ranks, and wait a while for them."""
        self._order(End())
        self._ranks.leave()

    # --- work ---

    def _order(self, order: Order) -> None:
        for line in self._lines:
            line.send(order)

    def _order_to(self, rank: int, order: Order) -> None:
        self._lines[rank - 1].send(order)

    def _on_part(self, rank: int, said: PartSent | PartRead | Gathered) -> None:
        """On the threads of lines, and those that compute, send and fetch."""
        self._said.put((rank, said))
        self._wake()

    def _take(self, rank: int, said: PartSent | PartRead | Gathered) -> None:
        match said:
            case PartSent():
                if (report := self._partial.take(rank, said)) is not None:
                    super()._report(report)
            case PartRead():
                if (read := self._fetcher.take(rank, said)) is None:
                    return
                if read.report.error is None:
                    self._to_gather.append(read)
                else:
                    super()._report(read.report)
            case Gathered():
                self._computing = False
                self._steps_ended += 1
                gathered, self._gathering = self._gathering, []
                for fetched in gathered if said.error is None else ():
                    super()._report(fetched)

    def _report(self, event: Computed | SendReport | FetchReport) -> None:
        """On the threads that compute, send and fetch. Reports of this rank's own parts are counted like those of
        others."""
        match event:
            case SendReport():
                self._on_part(self._ranks.rank, PartSent.of(event))
            case FetchReport():
                self._on_part(self._ranks.rank, PartRead.of(event))
            case Computed():
                self._step_ended(event.error)
                super()._report(event)

    def _step_ended(self, error: str | None) -> None:
        """On the thread that computes."""
        self._ranks.end_step()
        if error is not None:
            # The collectives of the other ranks wait for this one: it is the end of all.
            self._failure = self._ranks.failure(error)

    def _on_computed(self, computed: Computed) -> None:
        self._steps_ended += 1
        super()._on_computed(computed)

    def _end(self, job: TransferJob) -> None:
        super()._end(job)
        self._order(Forget(job.attempt))

    def _start_step(self) -> None:
        if not self._said_failure:
            super()._start_step()

    def _next_step(self) -> PrefillStep[TransferJob] | None:
        """None, too, if a gather goes first, which is a pass for those who ask about progress."""
        if not self._to_gather:
            return super()._next_step()
        now = time.monotonic()
        self._gathering = [replace(read.report, waited=now - read.read_at) for read in self._to_gather]
        prefixes = tuple(read.prefix for read in self._to_gather)
        self._to_gather = []
        self._computing = True
        self._passes += 1
        self._order(Gather(prefixes))
        self._compute.between_steps(lambda: self._gather.run(prefixes), self._on_gathered)
        return None

    def _on_gathered(self, error: str | None) -> None:
        """On the thread that computes."""
        gathered = Gathered.of(error)
        self._step_ended(gathered.error)
        self._on_part(self._ranks.rank, gathered)

    def _drop_unwanted(self) -> None:
        """Prefixes whose jobs were stopped are not gathered any more."""
        for read in list(self._to_gather):
            if self._jobs[read.report.fetch.attempt].state is not JobState.FETCHING:
                self._to_gather.remove(read)
                super()._report(replace(read.report, error="not wanted any more", failure="timeout"))


class Layout:
    """Which rank computes which positions in a step."""

    def __init__(self, step: PrefillStep[TransferJob], ranks: int) -> None:
        lengths = [len(chunk.token_ids) for _, chunk in step.chunks]
        self._parts: dict[AttemptId, list[Part]] = {}
        for rank in range(ranks):
            for number, tokens in Shard(rank, ranks).blocks(lengths):
                job, chunk = step.chunks[number]
                part = Part(rank, chunk.start + tokens.start, chunk.start + tokens.stop)
                self._parts.setdefault(job.attempt, []).append(part)

    def parts(self, chunk: Chunk) -> list[Part]:
        """Who sends which of the chunk's positions."""
        cut = [Part(p.rank, max(p.start, chunk.start), min(p.stop, chunk.stop)) for p in self._parts[chunk.attempt]]
        return [part for part in cut if part.start < part.stop]


class GroupCompute:
    """Has the other ranks compute each step, too."""

    def __init__(
        self,
        own: StepCompute,
        ranks: int,
        layouts: WeakKeyDictionary[ForwardProgress, Layout],
        order: Callable[[Order], None],
    ) -> None:
        self._own = own
        self._num_ranks = ranks
        self._layouts = layouts
        self._order = order

    def start(self, step: PrefillStep[TransferJob]) -> ForwardProgress:
        """See ComputeThread."""
        self._order(Step(tuple(_planned(job, chunk.start, chunk.stop) for job, chunk in step.chunks)))
        progress = self._own.start(step)
        self._layouts[progress] = Layout(step, self._num_ranks)
        return progress

    def between_steps(self, work: Callable[[], None], on_end: Callable[[str | None], None]) -> None:
        """See StepCompute. Of this rank alone."""
        self._own.between_steps(work, on_end)

    def stop(self, timeout: float) -> bool:
        """See ComputeThread."""
        return self._own.stop(timeout)


class GroupSender:
    """Sends rank 0's part of a chunk; the other ranks send theirs. What no step computes is rank 0's to send."""

    def __init__(
        self,
        own: ChunkSender,
        layouts: WeakKeyDictionary[ForwardProgress, Layout],
        partial: PartialReports,
    ) -> None:
        self._own = own
        self._layouts = layouts
        self._partial = partial

    def open(self, decode: Peer) -> bool:
        """See Sender. The other ranks open a lane with the attempt."""
        return self._own.open(decode)

    def submit(self, chunk: Chunk) -> None:
        """See Sender. One report follows, when all parts have ended."""
        layout = self._layouts.get(chunk.progress)
        parts = [Part(0, chunk.start, chunk.stop)] if layout is None else layout.parts(chunk)
        self._partial.expect(chunk, parts)
        for part in parts:
            if part.rank == 0:
                self._own.submit(chunk.part(part.start, part.stop))

    def keep_only(self, boot_ids: set[str]) -> None:
        """See Sender."""
        self._own.keep_only(boot_ids)

    def stop(self, timeout: float) -> bool:
        """See Sender."""
        return self._own.stop(timeout)


def _planned(job: TransferJob, start: int, stop: int) -> PlannedChunk:
    assert job.pages is not None
    return PlannedChunk(job.attempt, start, stop, job.num_tokens + 1, job.pages)
