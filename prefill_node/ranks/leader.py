"""The engine of rank 0 of a prefill node: plans steps for all ranks, and counts the writes of all as its own."""

import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from control.messages import AttemptId, Peer, PrefillRequest
from engine.agreement import GroupFailed
from engine.chunked import PrefillStep
from engine.rank_line import lines_to_others
from engine.ranks import RankGroup
from model.shard import Shard
from prefill_node.compute import Computed, StepCompute
from prefill_node.engine import PrefillUpdate
from prefill_node.fetch import FetchReport
from prefill_node.job import TransferJob
from prefill_node.model_engine import EngineParts, ModelEngine
from prefill_node.outgoing import Chunk, SendReport
from prefill_node.progress import ForwardProgress
from prefill_node.ranks.orders import Begin, Connected, End, Forget, Order, PartSent, PlannedChunk, Step, Stop
from prefill_node.ranks.parts import Part, PartialReports
from prefill_node.sender import ChunkSender


class GroupEngine(ModelEngine):
    """A ModelEngine of which every step is computed, and every chunk sent, by all ranks.

    It alone allocates pages. A chunk is one for the jobs: its report comes when every rank has reported its block, so
    nothing is announced, or said to be out of flight, before all ranks have said so.
    """

    def __init__(self, parts: EngineParts, ranks: RankGroup) -> None:
        """It fetches no prefixes: every rank would need the bytes."""
        super().__init__(replace(parts, fetch_policy="never"))
        self._ranks = ranks
        self._sent: queue.SimpleQueue[tuple[int, PartSent]] = queue.SimpleQueue()
        """What ranks have said of their parts and the loop has not counted yet."""
        self._failure: GroupFailed | None = None
        self._said_failure = False
        self._connected: frozenset[str] = frozenset()
        self._lines = lines_to_others(ranks.place, self._on_part)
        self._partial = PartialReports()
        layouts: WeakKeyDictionary[ForwardProgress, Layout] = WeakKeyDictionary()
        self._compute = GroupCompute(self._compute, ranks.size, layouts, self._order)
        self._sender = GroupSender(self._sender, layouts, self._partial)

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
        while not self._sent.empty():
            if (report := self._partial.take(*self._sent.get())) is not None:
                super()._report(report)
        return super().poll()

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

    def _on_part(self, rank: int, sent: Any) -> None:
        """On the line's thread."""
        self._sent.put((rank, sent))
        self._wake()

    def _report(self, event: Computed | SendReport | FetchReport) -> None:
        """On the threads that compute and send. Reports of this rank's own parts are counted like those of others."""
        if isinstance(event, SendReport):
            self._on_part(self._ranks.rank, PartSent.of(event))
            return
        assert isinstance(event, Computed), "nothing is fetched"
        self._ranks.end_step()
        if event.error is not None:
            # The collectives of the other ranks wait for this one: it is the end of all.
            self._failure = self._ranks.failure(event.error)
        super()._report(event)

    def _end(self, job: TransferJob) -> None:
        super()._end(job)
        self._order(Forget(job.attempt))

    def _start_step(self) -> None:
        if not self._said_failure:
            super()._start_step()


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
