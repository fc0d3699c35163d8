"""A rank of a prefill node other than 0: computes, sends and fetches its blocks of what rank 0 plans."""

import time
from collections import deque

import numpy as np
import torch

from control.messages import AttemptId, Message, Peer
from engine.chunked import ChunkedPrefill, PrefillStep
from kvcache.paged_pool import PagedSequence
from model.passes import PrefillChunk
from prefill_node.arrival import PrefixArrival
from prefill_node.compute import Computed, ComputeThread
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.fetch import Fetch, FetchReport
from prefill_node.fetcher import Fetcher, FetchResources
from prefill_node.job import JobState, TransferJob
from prefill_node.outgoing import SendReport
from prefill_node.ranks.gathering import Gathered, PrefixGather
from prefill_node.ranks.order_codec import OF_OTHERS
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
    Read,
    Step,
    Stop,
    StopReading,
)
from prefill_node.sender import Sender, SendResources
from ranks.barrier import GroupFailed
from ranks.group import RankGroup
from ranks.rank_line import line_to_first
from service.shell import NodeShell

_IDLE_WAIT_S = 0.2
_CLOSE_S = 1.0
_WATCH_S = 1.0


Event = Order | Computed | Gathered


class Follower:
    """Holds an attempt from `Begin` until `Forget`. One loop calls it; the inbox of the shell has the orders.

    It pings the decode nodes itself, since each rank has a lease of its own. It says nothing else to them: rank 0 hears
    what it has sent, and speaks for all.
    """

    def __init__(
        self,
        shell: NodeShell[Event],
        prefill: ChunkedPrefill[TransferJob],
        device: torch.device,
        resources: SendResources,
        fetching: FetchResources,
        gather: PrefixGather,
        ranks: RankGroup,
    ) -> None:
        """prefill: of which `compute` is used; rank 0 plans."""
        self._shell = shell
        self._pool = prefill.pool
        self._ranks = ranks
        self._jobs: dict[AttemptId, TransferJob] = {}
        self._decode_nodes = DecodeNodes(shell.control)
        self._watch_at = 0.0
        self._ended = False
        self._compute = ComputeThread(prefill, device, self._on_computed)
        self._sender = Sender(resources, self._on_sent)
        self._fetcher = Fetcher(fetching, self._on_read)
        self._gather = gather
        self._steps_ended = 0
        """Steps and gathers."""
        self._reads: deque[Read] = deque()
        """What is not submitted before more of them have ended."""
        self._not_read: set[AttemptId] = set()
        """Held attempts of which no more reads are to be posted."""
        self._line = line_to_first(ranks.lines, OF_OTHERS, shell.inbox.put, ranks.fail)

    def run(self) -> None:
        """Obey until rank 0 ends the node. Raises GroupFailed if a rank ends otherwise, or fails to compute."""
        while not self._ended:
            for item in self._shell.receive(_IDLE_WAIT_S):
                self._take(item)
            lifecycle = self._shell.lifecycle
            lifecycle.follow(self._ranks.sync_phase(lifecycle.phase))
            self._ranks.check()
            if time.monotonic() >= self._watch_at:
                self._watch()
        self._sender.stop(_CLOSE_S)
        self._compute.stop(_CLOSE_S)
        self._ranks.leave()

    def _take(self, item: tuple[Peer, Message] | Event) -> None:
        """Raises GroupFailed."""
        match item:
            case Begin(decode=decode, request=request):
                self._jobs[request.attempt] = TransferJob.of(request, decode)
                if not self._sender.open(decode):
                    raise GroupFailed(f"rank {self._ranks.rank} sends to as many decode nodes as it can, unlike rank 0")
                self._watch()
            case Step():
                self._start(item)
            case Stop(attempt=attempt):
                job = self._jobs[attempt]
                if job.state is not JobState.STOPPING:
                    job.move(JobState.STOPPING)
            case Read():
                self._reads.append(item)
                self._submit_reads()
            case StopReading(attempt=attempt):
                self._not_read.add(attempt)
            case Gather(prefixes=prefixes):
                self._compute.between_steps(lambda: self._gather.run(prefixes), self._on_gathered)
            case Forget(attempt=attempt):
                del self._jobs[attempt]
                self._not_read.discard(attempt)
            case Connected(decode_nodes=boot_ids):
                self._sender.keep_only(set(boot_ids))
                self._fetcher.keep_only(set(boot_ids))
            case End():
                self._ended = True
            case Computed(error=str() as error) | Gathered(error=str() as error):
                raise self._ranks.failure(error)
            case Computed() | Gathered():
                self._steps_ended += 1
                self._submit_reads()
            case _:
                pass  # Messages are for rank 0.

    def _start(self, order: Step) -> None:
        """Compute a step, and send this rank's block of it."""
        step = PrefillStep([self._planned(chunk) for chunk in order.chunks])
        progress = self._compute.start(step)
        lengths = [len(chunk.token_ids) for _, chunk in step.chunks]
        for number, tokens in self._ranks.shard.blocks(lengths):
            job, chunk = step.chunks[number]
            if part := job.chunk(chunk.start + tokens.start, chunk.start + tokens.stop, progress):
                self._sender.submit(part)

    def _planned(self, planned: PlannedChunk) -> tuple[TransferJob, PrefillChunk]:
        job = self._jobs[planned.attempt]
        if job.pages is None or not np.array_equal(job.pages, planned.pages):
            job.pages = planned.pages
            job.cache = PagedSequence(self._pool, planned.pages)
        assert job.cache is not None
        ids = job.token_ids[planned.start : planned.stop]
        return job, PrefillChunk(ids, planned.start, planned.sequence_length, job.cache)

    def _submit_reads(self) -> None:
        """Read what was ordered, but for what an earlier step may still write to. They are ordered in this order."""
        while self._reads and self._reads[0].after <= self._steps_ended:
            self._submit(self._reads.popleft())

    def _submit(self, read: Read) -> None:
        job = self._jobs[read.attempt]
        fetch = Fetch(
            attempt=read.attempt,
            decode=job.decode,
            destination=job.destination,
            start=read.start,
            stop=read.stop,
            pages=read.pages,
            slots=read.slots,
            checksums=read.checksums,
            go_on=lambda: job.state is not JobState.STOPPING and job.attempt not in self._not_read,
            arrival=PrefixArrival(self._pool.layout.layer_of_buffer),
        )
        self._fetcher.submit(fetch)

    def _watch(self) -> None:
        self._watch_at = time.monotonic() + _WATCH_S
        self._decode_nodes.watch({job.decode for job in self._jobs.values()})

    # --- on other threads ---

    def _on_computed(self, computed: Computed) -> None:
        self._ranks.end_step()
        self._shell.inbox.put(computed)

    def _on_gathered(self, error: str | None) -> None:
        self._ranks.end_step()
        self._shell.inbox.put(Gathered.of(error))

    def _on_sent(self, report: SendReport) -> None:
        self._line.send(PartSent.of(report, self._ranks.clock_ahead))

    def _on_read(self, report: FetchReport) -> None:
        self._line.send(PartRead.of(report))
