"""Chunked prefill: prompts computed in chunks, several requests in one forward pass."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from engine.paged_pool import PagedKVPool, PagedSequence
from engine.prompt_logprobs import QueuedLogprobs
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from transfer.planner import Int64s


@dataclass(eq=False)
class PrefillJob:
    """The tokens of a prompt whose KV is to be computed: all but the last, which a decode step computes.

    token_ids: int64, in host memory. computed: how many of them are computed. pages, cache: set from the first chunk
    until the job is released. prompt_logprobs: log probabilities of the tokens are asked for, with so many alternatives
    each; then last_token is the prompt's last token.
    """

    token_ids: torch.Tensor
    prompt_logprobs: int | None = field(default=None, kw_only=True)
    last_token: int | None = field(default=None, kw_only=True)
    computed: int = field(default=0, init=False)
    pages: Int64s | None = field(default=None, init=False)
    cache: PagedSequence | None = field(default=None, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.computed

    def tokens_behind(self, chunk: PrefillChunk) -> torch.Tensor:
        """The tokens of positions [chunk.start + 1, chunk.stop + 1), which a chunk says the probabilities of."""
        behind = self.token_ids[chunk.start + 1 : chunk.stop + 1]
        if chunk.stop < self.num_tokens:
            return behind
        assert self.last_token is not None, "a prompt with log probabilities names its last token"
        return torch.cat((behind, torch.tensor([self.last_token])))


JobT = TypeVar("JobT", bound=PrefillJob)


@dataclass(frozen=True)
class PrefillStep(Generic[JobT]):
    """The chunks of one forward pass."""

    chunks: list[tuple[JobT, PrefillChunk]]


class ChunkedPrefill(Generic[JobT]):
    """Computes jobs first come, first served: `chunk_size` tokens per step, of as many jobs as that takes.

    A job gets the pages of all its tokens before its first chunk, so a started job always ends. It keeps them until
    `release`. A step is planned, computed and completed. One thread owns the jobs; only `compute` may run on another,
    as long as no job of the step is released before it ends.
    """

    def __init__(self, model: SparseModel, pool: PagedKVPool, chunk_size: int) -> None:
        self._model = model
        self._chunk_size = chunk_size
        self.pool = pool
        self._waiting: deque[JobT] = deque()
        self._running: deque[JobT] = deque()

    @property
    def queued_tokens(self) -> int:
        # Copies: heartbeats ask while the owner changes the queues.
        return sum(job.remaining for job in (*list(self._waiting), *list(self._running)))

    def fits(self, num_tokens: int) -> bool:
        """Whether that many tokens can ever be computed here."""
        return self.pool.pages_for(num_tokens) <= self.pool.num_pages

    def add(self, job: JobT) -> None:
        self._waiting.append(job)

    def forget(self, job: JobT) -> None:
        """Compute no more of the job; its pages stay until `release`."""
        for queue in (self._waiting, self._running):
            if job in queue:
                queue.remove(job)

    def release(self, job: JobT) -> None:
        """Free the job's pages, finished or not."""
        self.forget(job)
        if job.pages is not None:
            self.pool.free(job.pages)
            job.pages = job.cache = None

    def plan(self) -> PrefillStep[JobT] | None:
        """The next step, or None if no job can go on. Complete it, or release its jobs, before planning another."""
        self._start_waiting()
        chunks = self._take_chunks()
        return PrefillStep(chunks) if chunks else None

    @torch.inference_mode()
    def compute(
        self, step: PrefillStep[JobT], on_layer: Callable[[int], None] = lambda _: None
    ) -> dict[JobT, QueuedLogprobs]:
        """Queue the step's forward pass. `on_layer` is called when the kernels that write a layer's KV are queued.

        Returns the log probabilities of the tokens behind the chunks of those jobs that ask for them.
        """
        chunks = [chunk for _, chunk in step.chunks]
        if all(job.prompt_logprobs is None for job, _ in step.chunks):
            self._model.prefill(chunks, on_layer)
            return {}
        lengths = [len(chunk.token_ids) for chunk in chunks]
        hidden = torch.split(self._model.prefill_hidden(chunks, on_layer), lengths)
        queued = {}
        for (job, chunk), states in zip(step.chunks, hidden, strict=True):
            if job.prompt_logprobs is not None:
                found = self._model.logprobs(states, job.tokens_behind(chunk), job.prompt_logprobs)
                queued[job] = QueuedLogprobs.of(chunk.start + 1, found)
        return queued

    def complete(self, step: PrefillStep[JobT]) -> None:
        """Count a step's tokens as computed."""
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

    def _take_chunks(self) -> list[tuple[JobT, PrefillChunk]]:
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
