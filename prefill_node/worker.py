"""What one rank of a prefill node does: it computes steps, sends and reads blocks, and exchanges prefixes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch

from engine.chunked import WantedLogprobs, compute_chunks
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from prefill_node.arrival import AllJobsVoid, AwaitedPrefixes, PrefixArrival
from prefill_node.compute import ComputeThread, Task
from prefill_node.fetch import Fetch
from prefill_node.fetcher import Fetcher, FetchResources
from prefill_node.gathering import PrefixGather
from prefill_node.orders import (
    BlockToRead,
    BlockToSend,
    CancelTransfers,
    End,
    Gather,
    Order,
    Report,
    Send,
    Serve,
    Step,
    StepChunk,
    StepEnded,
    TransferReport,
)
from prefill_node.outgoing import Chunk
from prefill_node.progress import ForwardProgress
from prefill_node.sender import Sender, SendResources
from ranks.group import Ranks

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Block:
    """A block that is being sent or read. arrival: of its layers, if it is read."""

    arrival: PrefixArrival | None = None
    is_cancelled: bool = False


class PrefillWorker:
    """A Worker of one rank (`ranks/executor.py`). One loop gives it orders; its threads report.

    It knows no attempts: what it has to know of one is in the orders.
    """

    def __init__(
        self,
        model: SparseModel,
        pool: PagedKVPool,
        sending: SendResources,
        fetching: FetchResources,
        gather: PrefixGather,
        ranks: Ranks,
        report: Callable[[Report], None],
    ) -> None:
        """gather: of the prefixes that ranks have read. report: called on any thread, once for each step, and once for
        each block when all of it has ended as far as can be known."""
        self._model = model
        self._pool = pool
        self._device = pool.kv.device
        self._gather = gather
        self._report = report
        self._compute = ComputeThread(self._device, ranks, report)
        self._sender = Sender(sending)
        self._fetcher = Fetcher(fetching, lambda: self._compute.tasks_ended)
        self._blocks: dict[int, _Block] = {}
        """By number: those that are under way."""
        self._over = ForwardProgress.over(self._device, pool.layout.num_layers)
        self._last_step = 0, self._over

    def take(self, order: Order) -> None:
        """See Worker."""
        match order:
            case Step():
                self._start(order)
            case Send(write=write, step=step):
                number, progress = self._last_step
                self._send(write, progress if step == number else self._over)
            case BlockToRead():
                self._read(order)
            case Gather():
                self._compute.start(Task(order.number, "gathering", lambda: self._exchange(order)))
            case CancelTransfers(works=works):
                for block in filter(None, map(self._blocks.get, works)):
                    block.is_cancelled = True
                    if block.arrival is not None:
                        block.arrival.give_up()
            case Serve(decode_nodes=decode_nodes):
                boot_ids = {decode.boot_id for decode in decode_nodes}
                self._sender.keep_only(boot_ids)
                self._fetcher.keep_only(boot_ids)
            case End():
                pass

    def close(self, timeout: float) -> bool:
        """See Worker. No pass waits for a prefix any more. What has not ended in time ends with the process."""
        deadline = time.monotonic() + timeout
        for block in list(self._blocks.values()):
            if block.arrival is not None:
                block.arrival.give_up()
        self._fetcher.keep_only(set())
        if not (is_sent := self._sender.stop(timeout)):
            log.warning("writes are still in flight; the worker's end stops them")
        if not (is_computed := self._compute.stop(max(0.0, deadline - time.monotonic()))):
            log.warning("a forward pass is still under way; the worker's end stops it")
        return is_sent and is_computed

    def _start(self, step: Step) -> None:
        progress = ForwardProgress(self._device)
        self._last_step = step.number, progress
        arrivals = {}
        for number, chunk in enumerate(step.chunks):
            block = None if chunk.awaits is None else self._blocks.get(chunk.awaits)
            # A prefix that has ended is complete, or the planner knows that it is not.
            if block is not None and block.arrival is not None:
                arrivals[number] = block.arrival
        awaited = AwaitedPrefixes(arrivals, len(step.chunks), step.patience)
        self._compute.start(Task(step.number, "prefill", lambda: self._queue(step, progress, awaited), progress.fail))
        for write in step.writes:
            self._send(write, progress)

    def _send(self, write: BlockToSend, progress: ForwardProgress) -> None:
        block = self._blocks[write.work] = _Block()
        self._sender.submit(Chunk(write, lambda: not block.is_cancelled, self._block_ended, progress))

    def _read(self, read: BlockToRead) -> None:
        arrival = PrefixArrival(
            self._pool.layout.layer_of_buffer, read.work, self._report if read.reports_layers else None
        )
        block = self._blocks[read.work] = _Block(arrival)

        def ended(report: TransferReport) -> None:
            if report.error is not None:
                arrival.give_up()
            arrival.end(lambda in_time: self._block_ended(replace(report, in_time=in_time)))

        self._fetcher.submit(Fetch(read, lambda: not block.is_cancelled, ended, arrival))

    # --- on other threads ---

    def _queue(self, step: Step, progress: ForwardProgress, awaited: AwaitedPrefixes) -> Callable[[], StepEnded]:
        """Queue a step. The host waits for layers that are read before it queues what reads them."""

        def on_layer(layer: int) -> None:
            progress.layer_done(layer)
            awaited.wait(layer)

        queued = {}
        try:
            chunks = [self._chunk(chunk) for chunk in step.chunks]
            queued = compute_chunks(self._model, chunks, [_wanted(chunk) for chunk in step.chunks], on_layer)
        except AllJobsVoid:
            progress.fail()
        return lambda: StepEnded(
            step.number,
            prompt_logprobs={number: found.wait() for number, found in queued.items()},
            void=frozenset(awaited.void),
        )

    def _chunk(self, chunk: StepChunk) -> PrefillChunk:
        tokens, pages = torch.from_numpy(chunk.token_ids), PagedSequence(self._pool, chunk.pages)
        return PrefillChunk(tokens, chunk.start, chunk.sequence_length, pages)

    def _exchange(self, gather: Gather) -> Callable[[], StepEnded]:
        self._gather.run(gather.prefixes)
        return partial(StepEnded, gather.number)

    def _block_ended(self, report: TransferReport) -> None:
        self._blocks.pop(report.work, None)
        self._report(report)


def _wanted(chunk: StepChunk) -> WantedLogprobs | None:
    return None if chunk.next_ids is None else WantedLogprobs(torch.from_numpy(chunk.next_ids), chunk.alternatives)
