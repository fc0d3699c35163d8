"""Chunked prefill: prompts computed piece by piece, several requests in one forward pass."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from model.passes import PrefillChunk
from model.sampling import Sampled, SamplingParams, sample
from model.sparse_model import SparseModel
from prefill_node.pool import PagedKVPool, PagedSequence
from transfer.planner import Int64s

Key = TypeVar("Key")


@dataclass(eq=False)
class PrefillJob(Generic[Key]):
    """A prompt to compute. `step` is the index of the token to sample after it (0 unless it resumes)."""

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
    """Positions [start, stop) of a job are in its pages; `token` is sampled after the last one."""

    job: PrefillJob[Key]
    start: int
    stop: int
    token: Sampled | None


class ChunkedPrefill(Generic[Key]):
    """Computes jobs first come, first served, `chunk_size` tokens per step over as many jobs as fit.

    A job gets the pages of its whole prompt before its first chunk, so a started job always ends. Its pages stay
    until `release`, which also takes back a job that was not finished.
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

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

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

    @torch.inference_mode()
    def step(self) -> list[ComputedChunk[Key]]:
        """Compute the next chunks in one forward pass; an empty list if no job can go on."""
        self._start_waiting()
        taken = self._take_chunks()
        if not taken:
            return []
        logits = self._model.prefill([chunk for _, chunk in taken])
        done = [i for i, (job, chunk) in enumerate(taken) if job.remaining == len(chunk.token_ids)]
        tokens = iter(
            sample(logits[done], [taken[i][0].sampling for i in done], [taken[i][0].step for i in done]) if done else ()
        )
        results = []
        for job, chunk in taken:
            job.computed += len(chunk.token_ids)
            token = None
            if job.remaining == 0:
                self._running.remove(job)
                token = next(tokens)
            results.append(ComputedChunk(job, chunk.start, job.computed, token))
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
