"""Chunked prefill: prompts computed piece by piece, several requests in one forward pass."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from engine.paged_pool import PagedKVPool, PagedSequence
from engine.sampling import NotSampled, Sampled, SamplingParams, sample
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from transfer.planner import Int64s

Key = TypeVar("Key")


@dataclass(eq=False)
class PrefillJob(Generic[Key]):
    """A prompt to compute. `step` is the index of the token to sample after it (0 unless it resumes).

    prompt_ids: int64, in host memory.
    """

    key: Key
    prompt_ids: torch.Tensor
    sampling: SamplingParams
    step: int = 0
    pages: Int64s | None = None
    computed: int = 0
    cache: PagedSequence | None = field(default=None, repr=False)

    @property
    def remaining(self) -> int:
        return len(self.prompt_ids) - self.computed


@dataclass(frozen=True)
class ComputedChunk(Generic[Key]):
    """Positions [start, stop) of a job are in its pages.

    After the last of the prompt, `token` is what follows it, or `failure` says why there is none.
    """

    job: PrefillJob[Key]
    start: int
    stop: int
    token: Sampled | None
    failure: str | None = None


@dataclass(frozen=True)
class PrefillStep(Generic[Key]):
    """The chunks of one forward pass."""

    chunks: list[tuple[PrefillJob[Key], PrefillChunk]]


class ChunkedPrefill(Generic[Key]):
    """Computes jobs first come, first served, `chunk_size` tokens per step over as many jobs as fit.

    A job gets the pages of its whole prompt before its first chunk, so a started job always ends. Its pages stay
    until `release`, which also takes back a job that was not finished.

    A step is planned, computed and completed. One thread owns the jobs; `compute` touches none of them and may run on
    another, as long as no job of the step is released before it ends.
    """

    def __init__(self, model: SparseModel, pool: PagedKVPool, chunk_size: int) -> None:
        self._model = model
        self._chunk_size = chunk_size
        self.pool = pool
        self._waiting: deque[PrefillJob[Key]] = deque()
        self._running: deque[PrefillJob[Key]] = deque()

    @property
    def queued_tokens(self) -> int:
        # Copies: heartbeats ask while the owner changes the queues.
        return sum(job.remaining for job in (*list(self._waiting), *list(self._running)))

    def fits(self, num_tokens: int) -> bool:
        """Whether a prompt of this length can ever be computed here."""
        return self.pool.pages_for(num_tokens) <= self.pool.num_pages

    def add(self, job: PrefillJob[Key]) -> None:
        self._waiting.append(job)

    def forget(self, job: PrefillJob[Key]) -> None:
        """Compute no more of the job; its pages stay until `release`."""
        for queue in (self._waiting, self._running):
            if job in queue:
                queue.remove(job)

    def release(self, job: PrefillJob[Key]) -> None:
        """Free the job's pages, finished or not."""
        self.forget(job)
        if job.pages is not None:
            self.pool.free(job.pages)
            job.pages = job.cache = None

    def step(self) -> list[ComputedChunk[Key]]:
        """Plan, compute and complete the next step; an empty list if no job can go on."""
        step = self.plan()
        return [] if step is None else self.complete(step, self.compute(step))

    def plan(self) -> PrefillStep[Key] | None:
        """The next step, or None if no job can go on. It must be completed, or its jobs released, before another."""
        self._start_waiting()
        chunks = self._take_chunks()
        return PrefillStep(chunks) if chunks else None

    @torch.inference_mode()
    def compute(
        self, step: PrefillStep[Key], on_layer: Callable[[int], None] | None = None
    ) -> list[Sampled | NotSampled | None]:
        """Run the step's forward pass. Returns the token after each chunk that ends its prompt, None for others.

        `on_layer` is called when the kernels that write a layer's KV are queued.
        """
        logits = self._model.prefill([chunk for _, chunk in step.chunks], on_layer)
        last = [i for i, (job, chunk) in enumerate(step.chunks) if chunk.stop == len(job.prompt_ids)]
        tokens: list[Sampled | NotSampled | None] = [None] * len(step.chunks)
        if last:
            jobs = [step.chunks[i][0] for i in last]
            sampled = sample(logits[last], [job.sampling for job in jobs], [job.step for job in jobs])
            for i, token in zip(last, sampled, strict=True):
                tokens[i] = token
        return tokens

    def complete(
        self, step: PrefillStep[Key], tokens: Sequence[Sampled | NotSampled | None]
    ) -> list[ComputedChunk[Key]]:
        """Note what a step computed. Jobs that were forgotten meanwhile stay so."""
        results = []
        for (job, chunk), token in zip(step.chunks, tokens, strict=True):
            job.computed = chunk.stop
            if token is not None and job in self._running:
                self._running.remove(job)
            if isinstance(token, NotSampled):
                results.append(ComputedChunk(job, chunk.start, chunk.stop, None, token.reason))
            else:
                results.append(ComputedChunk(job, chunk.start, chunk.stop, token))
        return results

    def _start_waiting(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            job.pages = self.pool.allocate(len(job.prompt_ids))
            if job.pages is None:
                return
            job.cache = PagedSequence(self.pool, job.pages)
            self._running.append(self._waiting.popleft())

    def _take_chunks(self) -> list[tuple[PrefillJob[Key], PrefillChunk]]:
        budget = self._chunk_size
        taken = []
        for job in self._running:
            if budget == 0:
                break
            assert job.cache is not None
            length = min(budget, job.remaining)
            budget -= length
            ids = job.prompt_ids[job.computed : job.computed + length]
            taken.append((job, PrefillChunk(ids, job.computed, len(job.prompt_ids), job.cache)))
        return taken
