"""Chunked prefill: prompts computed in chunks, several requests in one forward pass."""

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch

from engine.prompt_logprobs import QueuedLogprobs
from kvcache.block_cache import PromptIds
from kvcache.page_cache import PageCache, PageLease
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from transfer.planner import Int64s


@dataclass(eq=False)
class PrefillJob:
    """The tokens of a prompt whose KV is to be computed: all but the last, which a decode step computes.

    token_ids: int64, in host memory. salt: jobs with different ones share no cached KV. prompt_logprobs: log
    probabilities of the tokens are asked for, with so many alternatives each; then every token is computed, whatever is
    cached, and last_token is the prompt's last token. computed: how many tokens have KV in the pool. cached: how many
    of these had it when the job came to them. is_held: it is in no step, since KV is brought to its pages (`brought`).
    lease, pages, cache: set from the job's start until it is released.
    """

    token_ids: torch.Tensor
    salt: str = field(default="", init=False)
    prompt_logprobs: int | None = field(default=None, kw_only=True)
    last_token: int | None = field(default=None, kw_only=True)
    computed: int = field(default=0, init=False)
    cached: int = field(default=0, init=False)
    is_held: bool = field(default=False, init=False)
    lease: PageLease | None = field(default=None, init=False, repr=False)
    pages: Int64s | None = field(default=None, init=False, repr=False)
    cache: PagedSequence | None = field(default=None, init=False, repr=False)

    @property
    def reuse(self) -> bool:
        """Whether cached pages may be used. Log probabilities come only of tokens that are computed."""
        return self.prompt_logprobs is None

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


class CachedRange(NamedTuple, Generic[JobT]):
    """Positions [start, stop) of a started job, which had KV in the pool."""

    job: JobT
    start: int
    stop: int


@dataclass(frozen=True)
class PrefillStep(Generic[JobT]):
    """The chunks of one forward pass."""

    chunks: list[tuple[JobT, PrefillChunk]]


class ChunkedPrefill(Generic[JobT]):
    """Computes jobs first come, first served: `chunk_size` tokens per step, of as many jobs as that takes.

    A job gets the pages of all its tokens before its first chunk, so a started job always ends. It keeps them until
    `release`. A step is planned, computed and completed. One thread owns the jobs; only `compute` may run on another,
    as long as no job of the step is released before it ends.

    With a cache, a job begins behind the longest prefix of its tokens that has KV: at its start, and once more before
    its first chunk, since jobs before it may have computed the same tokens meanwhile. A job of which nothing is left
    is in no step. What a step has computed is cached when it is completed, so a step of which the forward pass has not
    ended, or has failed, is not to be completed.

    KV that others bring (`brought`) may come while a step computes behind it: that sets `computed` before, waits in
    `on_layer` for each layer, and leaves the job out of what it completes if it did not come.
    """

    def __init__(self, model: SparseModel, pool: PagedKVPool, chunk_size: int, cache: PageCache | None = None) -> None:
        """cache: of that pool; none by default."""
        self._model = model
        self.chunk_size = chunk_size
        self.pool = pool
        self.pages = cache or PageCache(pool)
        self._waiting: deque[JobT] = deque()
        self._running: deque[JobT] = deque()
        self._found: list[CachedRange[JobT]] = []
        self._started: list[JobT] = []

    @property
    def queued_tokens(self) -> int:
        """Tokens that are to be computed, as far as is known: a waiting job's prefix may be given up or come."""
        # Copies: heartbeats ask while the owner changes the queues.
        waiting = sum(job.num_tokens - job.cached for job in list(self._waiting))
        return waiting + sum(job.remaining for job in list(self._running))

    def fits(self, num_tokens: int) -> bool:
        """Whether that many tokens can ever be computed here."""
        return self.pool.pages_for(num_tokens) <= self.pool.num_pages

    def add(self, job: JobT) -> None:
        job.cached = self.pages.find(_ids(job), job.salt) if job.reuse else 0
        self._waiting.append(job)

    def forget(self, job: JobT) -> None:
        """Compute no more of the job, and say nothing more of it; its pages stay until `release`."""
        for queue in (self._waiting, self._running, self._started):
            if job in queue:
                queue.remove(job)
        self._found = [found for found in self._found if found.job is not job]

    def release(self, job: JobT) -> None:
        """Give the job's pages back, finished or not."""
        self.forget(job)
        if job.lease is not None:
            self.pages.give_back(job.lease)
            job.lease = job.pages = job.cache = None

    def start_waiting(self) -> None:
        """Start waiting jobs, in their order, while there are pages. `plan` does so, too."""
        while self._waiting:
            job = self._waiting[0]
            job.lease = self.pages.lend(_ids(job), job.salt, job.reuse)
            if job.lease is None:
                return
            self._waiting.popleft()
            self._use_cached(job, job.lease)
            if job.remaining:
                self._running.append(job)
                self._started.append(job)

    def take_started(self) -> list[JobT]:
        """Jobs that were started since the last call, and of which something is left, with their pages."""
        started, self._started = self._started, []
        return started

    def brought(self, job: JobT, stop: int) -> None:
        """The first `stop` tokens of a job have KV now, as if they had been computed; they are cached.

        Nothing of the job was computed yet, or what is computed of it now begins there.
        """
        assert job.lease is not None
        job.computed = stop
        self.pages.insert(job.lease, stop)

    def look_again(self, job: JobT) -> None:
        """Use what was cached since a job started of which nothing was computed."""
        self._look_again(job)

    def take_found(self) -> list[CachedRange[JobT]]:
        """What was found in the cache since the last call, for jobs of which it was not said before."""
        found, self._found = self._found, []
        return found

    def plan(self) -> PrefillStep[JobT] | None:
        """The next step, or None if no job can go on. Complete it, or release its jobs, before planning another."""
        self.start_waiting()
        chunks = self._take_chunks()
        return PrefillStep(chunks) if chunks else None

    @torch.inference_mode()
    def compute(
        self, step: PrefillStep[JobT], on_layer: Callable[[int], None] = lambda _: None
    ) -> dict[JobT, QueuedLogprobs]:
        """Queue the step's forward pass. `on_layer` is called when the kernels that write a layer's KV are queued, and
        before any that read that layer's KV of earlier positions: it may wait for those.

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

    def complete(self, step: PrefillStep[JobT], without: Set[JobT] = frozenset()) -> None:
        """Count a step's tokens as computed, and cache them, but for those of these jobs."""
        for job, chunk in step.chunks:
            if job in without:
                continue
            job.computed = chunk.stop
            if job.lease is not None:
                self.pages.insert(job.lease, chunk.stop)
            if not job.remaining and job in self._running:
                self._running.remove(job)

    def _use_cached(self, job: JobT, lease: PageLease) -> None:
        """The job goes on behind the prefix that its lease has found."""
        if lease.cached > job.computed:
            self._found.append(CachedRange(job, job.computed, lease.cached))
        job.computed = job.cached = lease.cached
        job.pages, job.cache = lease.pages, PagedSequence(self.pool, lease.pages)

    def _look_again(self, job: JobT) -> None:
        """Before a job's first chunk: use what was cached since it started."""
        assert job.lease is not None
        if job.reuse and job.computed == job.cached and self.pages.extend(job.lease):
            self._use_cached(job, job.lease)

    def _take_chunks(self) -> list[tuple[JobT, PrefillChunk]]:
        budget = self.chunk_size
        taken = []
        for job in list(self._running):
            if budget == 0:
                break
            if job.is_held:
                continue
            self._look_again(job)
            if not job.remaining:
                self._running.remove(job)
                continue
            assert job.cache is not None
            length = min(budget, job.remaining)
            budget -= length
            ids = job.token_ids[job.computed : job.computed + length]
            taken.append((job, PrefillChunk(ids, job.computed, job.num_tokens + 1, job.cache)))
        return taken


def _ids(job: PrefillJob) -> PromptIds:
    ids: PromptIds = job.token_ids.numpy()
    return ids
