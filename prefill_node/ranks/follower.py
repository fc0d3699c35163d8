"""A rank of a prefill node other than 0: computes and sends its blocks of the steps that rank 0 plans."""

import time

import numpy as np
import torch

from control.messages import AttemptId, Message, Peer
from engine.agreement import GroupFailed
from engine.chunked import ChunkedPrefill, PrefillStep
from engine.paged_pool import PagedSequence
from engine.rank_line import line_to_first
from engine.ranks import RankGroup
from model.passes import PrefillChunk
from prefill_node.compute import Computed, ComputeThread
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.job import JobState, TransferJob
from prefill_node.outgoing import SendReport
from prefill_node.ranks.orders import Begin, Connected, End, Forget, Order, PartSent, PlannedChunk, Step, Stop
from prefill_node.sender import Sender, SendResources
from service.shell import NodeShell
from service.standing import stand_with_group

_IDLE_WAIT_S = 0.2
_CLOSE_S = 1.0
_WATCH_S = 1.0

Event = Order | Computed


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
        self._line = line_to_first(ranks.place, shell.inbox.put)

    def run(self) -> None:
        """Obey until rank 0 ends the node. Raises GroupFailed if a rank ends otherwise, or fails to compute."""
        while not self._ended:
            for item in self._shell.receive(_IDLE_WAIT_S):
                self._take(item)
            stand_with_group(self._shell.lifecycle, self._ranks)
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
            case Forget(attempt=attempt):
                del self._jobs[attempt]
            case Connected(decode_nodes=boot_ids):
                self._sender.keep_only(set(boot_ids))
            case End():
                self._ended = True
            case Computed(error=str() as error):
                raise self._ranks.failure(error)
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

    def _watch(self) -> None:
        self._watch_at = time.monotonic() + _WATCH_S
        self._decode_nodes.watch({job.decode for job in self._jobs.values()})

    # --- on other threads ---

    def _on_computed(self, computed: Computed) -> None:
        self._ranks.end_step()
        self._shell.inbox.put(computed)

    def _on_sent(self, report: SendReport) -> None:
        self._line.send(PartSent.of(report, self._ranks.clock_ahead))
