"""What one rank of a prefill node does: it computes steps, sends and reads blocks, and exchanges prefixes."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog
import torch

from control.messages import Message, Peer
from engine.chunked import compute_chunks
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from model.split import GatherRows
from prefill_node import orders
from prefill_node.arrival import AllJobsVoid, AwaitedPrefixes, PrefixArrival
from prefill_node.compute import ComputeThread, ForwardProgress
from prefill_node.division import gather_prefixes
from prefill_node.fetch import Fetch, Fetcher
from prefill_node.lanes import DecodeNodes
from prefill_node.orders import Order, Report, Step, StepChunk, StepEnded, TransferReport
from prefill_node.pool_io import DeviceSink, DeviceSource, HostSink, HostSource, Reading, SendRings
from prefill_node.sender import Chunk, Sender
from ranks.executor import RankLine, Worker
from ranks.group import Ranks
from service.shell import NodeShell
from transfer.choices import ChecksumMode
from transfer.transports import Transports

log = structlog.get_logger(__name__)


class PrefillWorker:
    """A Worker of one rank (`ranks/executor.py`). One loop gives it orders; its threads report.

    It knows no attempts: what it has to know of one is in the orders.
    """

    def __init__(
        self,
        model: SparseModel,
        pool: PagedKVPool,
        transports: Transports,
        silence: Callable[[Peer], float],
        checksums: ChecksumMode,
        gather: GatherRows,
        ranks: Ranks,
        report: Callable[[Report], None],
    ) -> None:
        """silence: as of Lane. gather: see Exchange. report: called on any thread, once for each step, and once for
        each block when all of it has ended as far as can be known."""
        self._model = model
        self._pool = pool
        self._device = pool.kv.device
        self._gather = partial(gather_prefixes, pool, ranks.rank, gather)
        self._report = report
        self._compute = ComputeThread(self._device, ranks, report)
        layers, layer_of_buffer = [*pool.kv, *pool.index_keys], pool.layout.layer_of_buffer
        on_host = not pool.kv.is_cuda
        rings = SendRings(pin=not on_host, register=transports.register)
        source = HostSource(layers) if on_host else DeviceSource(layers)
        reading = Reading(source, layer_of_buffer, pool.page_size, checksums)
        self._sender = Sender(reading, rings, transports.connect, silence)
        self._fetcher = Fetcher(
            partial(transports.connect, reading=True),
            silence,
            new_sink=lambda: HostSink(layers) if on_host else DeviceSink(layers, rings),
            page_size=pool.page_size,
            steps_ended=lambda: self._compute.tasks_ended,
        )
        self._transfers: dict[int, Chunk | Fetch] = {}
        """By number: those that are under way."""
        self._over = ForwardProgress.over(self._device, pool.layout.num_layers)
        self._last_step = 0, self._over

    def take(self, order: Order) -> None:
        match order:
            case Step():
                self._start(order)
            case orders.BlockToSend():
                self._send(order)
            case orders.BlockToRead():
                self._read(order)
            case orders.Gather():
                self._compute.start(order.number, "gathering", lambda: self._exchange(order))
            case orders.CancelTransfers(works=works):
                for transfer in filter(None, map(self._transfers.get, works)):
                    transfer.cancel()
            case orders.Serve(decode_nodes=decode_nodes):
                boot_ids = {decode.boot_id for decode in decode_nodes}
                self._sender.keep_only(boot_ids)
                self._fetcher.keep_only(boot_ids)
            case orders.End():
                pass

    def close(self, timeout: float) -> bool:
        """See Worker. No pass waits for a prefix any more. Work that has not ended in time ends with the process."""
        deadline = time.monotonic() + timeout
        for transfer in list(self._transfers.values()):
            if isinstance(transfer, Fetch):
                transfer.arrival.give_up()
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
            # A prefix that has ended is complete, or the planner knows that it is not.
            if chunk.awaits is not None and isinstance(fetch := self._transfers.get(chunk.awaits), Fetch):
                arrivals[number] = fetch.arrival
        awaited = AwaitedPrefixes(arrivals, len(step.chunks), step.patience)
        self._compute.start(step.number, "prefill", lambda: self._queue(step, progress, awaited), progress.fail)
        for write in step.writes:
            self._send(write)

    def _send(self, write: orders.BlockToSend) -> None:
        last_step, progress = self._last_step
        if write.step != last_step:
            progress = self._over
        chunk = self._transfers[write.work] = Chunk(write, self._block_ended, progress)
        self._sender.submit(chunk)

    def _read(self, read: orders.BlockToRead) -> None:
        arrival = PrefixArrival(
            self._pool.layout.layer_of_buffer, read.work, self._report if read.reports_layers else None
        )

        def ended(report: TransferReport) -> None:
            if report.error is not None:
                arrival.give_up()
            arrival.end(lambda in_time: self._block_ended(replace(report, in_time=in_time)))

        fetch = self._transfers[read.work] = Fetch(read, ended, arrival)
        self._fetcher.submit(fetch)

    # --- on other threads ---

    def _queue(self, step: Step, progress: ForwardProgress, awaited: AwaitedPrefixes) -> Callable[[], StepEnded]:
        """Queue a step. The host waits for layers that are read before it queues what reads them."""

        def on_layer(layer: int) -> None:
            progress.layer_done(layer)
            awaited.wait(layer)

        queued = {}
        try:
            chunks = [self._chunk(chunk) for chunk in step.chunks]
            queued = compute_chunks(self._model, chunks, [chunk.alternatives for chunk in step.chunks], on_layer)
        except AllJobsVoid:
            progress.fail()
        return lambda: StepEnded(
            step.number,
            prompt_logprobs={number: found.wait() for number, found in queued.items()},
            void=frozenset(awaited.void),
        )

    def _chunk(self, chunk: StepChunk) -> PrefillChunk:
        token_ids, next_ids = torch.from_numpy(chunk.token_ids), torch.from_numpy(chunk.next_ids)
        pages = PagedSequence(self._pool, chunk.pages)
        return PrefillChunk(token_ids, next_ids, chunk.start, chunk.sequence_length, pages)

    def _exchange(self, gather: orders.Gather) -> Callable[[], StepEnded]:
        self._gather(gather.prefixes)
        return partial(StepEnded, gather.number)

    def _block_ended(self, report: TransferReport) -> None:
        self._transfers.pop(report.work, None)
        self._report(report)


_IDLE_WAIT_S = 0.2
_CLOSE_S = 1.0
_WATCH_S = 1.0


class RankLoop:
    """The loop of a rank other than 0: has its worker do what rank 0 orders.

    It pings the decode nodes itself, since each rank has a lease of its own. It says nothing else to them: rank 0
    hears what it has sent, and speaks for all.
    """

    def __init__(
        self,
        shell: NodeShell[Order | StepEnded],
        ranks: Ranks,
        new_worker: Callable[[Callable[[Report], None]], Worker[Order]],
    ) -> None:
        """new_worker: is told where the worker reports to."""
        self._shell = shell
        self._ranks = ranks
        self._decode_nodes = DecodeNodes(shell.control)
        self._served: tuple[Peer, ...] = ()
        self._watch_at = 0.0
        self._has_ended = False
        self._worker = new_worker(self._report)
        self._line = RankLine(ranks.lines[0], 0, orders.OF_OTHERS, shell.inbox.put, ranks.fail)

    def run(self) -> None:
        """Obey until rank 0 ends the node. Raises GroupFailed if a rank ends otherwise, or fails in a step."""
        while not self._has_ended:
            for item in self._shell.receive(_IDLE_WAIT_S):
                self.take(item)
            lifecycle = self._shell.lifecycle
            lifecycle.follow(self._ranks.sync_phase(lifecycle.phase))
            self._ranks.check()
            if time.monotonic() >= self._watch_at:
                self._watch()
        self._worker.close(_CLOSE_S)
        self._ranks.leave()

    def take(self, item: tuple[Peer, Message] | Order | StepEnded) -> None:
        """Raises GroupFailed."""
        match item:
            case StepEnded(error=error):
                if error is not None:
                    raise self._ranks.failure(RuntimeError(error))
            case orders.End():
                self._has_ended = True
            case orders.Serve(decode_nodes=decode_nodes):
                self._served = decode_nodes
                self._watch()
                self._worker.take(item)
            case tuple():
                pass  # Messages are for rank 0.
            case _:
                self._worker.take(item)

    def _watch(self) -> None:
        self._watch_at = time.monotonic() + _WATCH_S
        self._decode_nodes.watch(self._served)

    def _report(self, report: Report) -> None:
        """On any thread of the worker. Layers are reported where there is one rank."""
        if isinstance(report, TransferReport):
            self._line.send(report.by_clock(self._ranks.clock_ahead))
        elif isinstance(report, StepEnded):
            self._shell.inbox.put(report)
