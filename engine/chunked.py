"""Chunked prefill: prompts computed piece by piece, several requests in one forward pass."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from engine.paged_pool import PagedKVPool, PagedSequence
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from transfer.planner import Int64s


@dataclass(eq=False)
class PrefillJob:
    """Tokens whose KV is to be computed: all of a sequence but its last one, which a decode step computes.

    token_ids: int64, in host memory; whoever computes takes them to the device. computed: how many of them are. pages:
    of the pool, from the first chunk until the job is released.
    """

    token_ids: torch.Tensor
    computed: int = field(default=0, init=False)
    pages: Int64s | None = field(default=None, init=False)
    cache: PagedSequence | None = field(default=None, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.computed


Job = TypeVar("Job", bound=PrefillJob)


@dataclass(frozen=True)
class PrefillStep(Generic[Job]):
    """The chunks of one forward pass."""

    chunks: list[tuple[Job, PrefillChunk]]


class ChunkedPrefill(Generic[Job]):
    """Computes jobs first come, first served, `chunk_size` tokens per step over as many jobs as fit.

    A job gets the pages of all its tokens before its first chunk, so a started job always ends. Its pages stay until
    `release`, which also takes back a job that was not finished.

    A step is planned, computed and completed. One thread owns the jobs; `compute` touches none of them and may run on
    another, as long as no job of the step is released before it ends.
    """

    def __init__(self, model: SparseModel, pool: PagedKVPool, chunk_size: int) -> None:
        self._model = model
        self._chunk_size = chunk_size
        self.pool = pool
        self._waiting: deque[Job] = deque()
        self._running: deque[Job] = deque()

    @property
    def queued_tokens(self) -> int:
        # Copies: heartbeats ask while the owner changes the queues.
        return sum(job.remaining for job in (*list(self._waiting), *list(self._running)))

    def fits(self, num_tokens: int) -> bool:
        """Whether that many tokens can ever be computed here."""
        return self.pool.pages_for(num_tokens) <= self.pool.num_pages

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def forget(self, job: Job) -> None:
        """Compute no more of the job; its pages stay until `release`."""
        for queue in (self._waiting, self._running):
            if job in queue:
                queue.remove(job)

    def release(self, job: Job) -> None:
        """Free the job's pages, finished or not."""
        self.forget(job)
        if job.pages is not None:
            self.pool.free(job.pages)
            job.pages = job.cache = None

    def plan(self) -> PrefillStep[Job] | None:
        """The next step, or None if no job can go on. It must be completed, or its jobs released, before another."""
        self._start_waiting()
        chunks = self._take_chunks()
        return PrefillStep(chunks) if chunks else None

    @torch.inference_mode()
    def compute(self, step: PrefillStep[Job], on_layer: Callable[[int], None] = lambda _: None) -> None:
        """Queue the step's forward pass. `on_layer` is called when the kernels that write a layer's KV are queued."""
        self._model.prefill([chunk for _, chunk in step.chunks], on_layer)

    def complete(self, step: PrefillStep[Job]) -> None:
        """Note what a step computed. Jobs that were forgotten meanwhile stay so."""
        for job, chunk in step.chunks:
            job.computed = chunk.stop
            if not job.remaining and job in self._running:
                self._running.remove(job)

    def _start_waiting(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            job.pages = self.pool.allocate(job.num_tokens)
            if job.pages is None:
                return
            job.cache = PagedSequence(self.pool, job.pages)
            self._running.append(self._waiting.popleft())

    def _take_chunks(self) -> list[tuple[Job, PrefillChunk]]:
        budget = self._chunk_size
        taken = []
        for job in self._running:
            if budget == 0:
                break
            assert job.cache is not None
            length = min(budget, job.remaining)
            budget -= length
            ids = job.token_ids[job.computed : job.computed + length]
            taken.append((job, PrefillChunk(ids, job.computed, job.num_tokens + 1, job.cache)))
        return taken
