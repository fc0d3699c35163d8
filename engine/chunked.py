"""Chunked prefill: prompts computed in chunks, several requests in one forward pass."""

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch

from base.device import Download
from control.prompt_logprobs import PromptLogprobs
from kvcache.page_cache import PageCache, PageLease
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.passes import PrefillChunk
from model.sparse_model import SparseModel, TokenLogprobs
from transfer.planner import Int64s


@dataclass(eq=False)
class PrefillJob:
    """A prompt. The KV of all its tokens but the last, which a decode step computes, is to be computed: `token_ids`.

    prompt: int64, in host memory. salt: jobs with different ones share no cached KV. prompt_logprobs: log probabilities
    of the tokens are asked for, with so many alternatives each; then every token is computed, whatever is cached.
    computed: how many tokens have KV in the pool. cached: how many of these had it when the job came to them. lease,
    pages, cache: set from the job's start until it is released.
    """

    prompt: torch.Tensor
    salt: str = field(default="", init=False)
    prompt_logprobs: int | None = field(default=None, kw_only=True)
    computed: int = field(default=0, init=False)
    cached: int = field(default=0, init=False)
    lease: PageLease | None = field(default=None, init=False, repr=False)
    pages: Int64s | None = field(default=None, init=False, repr=False)
    cache: PagedSequence | None = field(default=None, init=False, repr=False)

    @property
    def is_paused(self) -> bool:
        """Whether it is in no step for now, since other KV comes to its pages (`ChunkedPrefill.mark_cached`)."""
        return False

    @property
    def reuse(self) -> bool:
        """Whether cached pages may be used. Log probabilities come only of tokens that are computed."""
        return self.prompt_logprobs is None

    @property
    def token_ids(self) -> torch.Tensor:
        return self.prompt[:-1]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) - 1

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.computed

    def next_chunk(self, length: int) -> PrefillChunk:
        """The first `length` tokens that are not computed."""
        assert self.cache is not None, "it has started"
        return PrefillChunk.of(self.prompt, self.computed, self.computed + length, self.cache)


JobT = TypeVar("JobT", bound=PrefillJob)


@dataclass(frozen=True)
class QueuedLogprobs:
    """Log probabilities of a prompt's consecutive positions from `start` on, on their way to the host.

    packed: int32 [rows, 2 * (1 + alternatives)], the two columns of PromptLogprobs side by side, the bits of floats.
    """

    start: int
    packed: Download

    @classmethod
    def of(cls, start: int, logprobs: TokenLogprobs) -> "QueuedLogprobs":
        floats = torch.cat((logprobs.own.unsqueeze(1), logprobs.top), dim=1).view(torch.int32)
        ints = torch.cat((logprobs.ranks.unsqueeze(1), logprobs.top_ids), dim=1)
        return cls(start, Download(torch.cat((ints, floats), dim=1)))

    def wait(self) -> PromptLogprobs:
        """The log probabilities, once they are there."""
        ints, floats = np.split(self.packed.wait().numpy(), 2, axis=1)
        return PromptLogprobs.of(self.start, ints, np.ascontiguousarray(floats).view(np.float32))


@dataclass(frozen=True)
class PrefillStep(Generic[JobT]):
    """The chunks of one forward pass."""

    chunks: list[tuple[JobT, PrefillChunk]]

    def compute(self, model: SparseModel) -> dict[JobT, QueuedLogprobs]:
        """Queue the forward pass. Returns the log probabilities that its jobs ask for."""
        wanted = [job.prompt_logprobs for job, _ in self.chunks]
        queued = compute_chunks(model, [chunk for _, chunk in self.chunks], wanted)
        return {self.chunks[number][0]: found for number, found in queued.items()}


class ChunkedPrefill(Generic[JobT]):
    """Plans steps of jobs, first come, first served: `chunk_size` tokens per step, of as many jobs as that takes.

    A job gets the pages of all its tokens before its first chunk, so a started job always ends. It keeps them until
    `release`. A step is planned, computed and completed. One thread owns the jobs; a step may be computed on another,
    as long as none of its jobs is released before it ends.

    With a cache, a job begins after the longest prefix of its tokens that has KV: at its start, and once more before
    its first chunk, since jobs before it may have computed the same tokens meanwhile. A job of which nothing is left
    is in no step. What a step has computed is cached when it is completed, so a step of which the forward pass has not
    ended, or has failed, is not to be completed.

    Other KV (`mark_cached`) may come while a step computes what comes after it: its owner sets `computed` before, has
    the step wait for each layer, and leaves the job out of what it completes if that KV did not come.
    """

    def __init__(self, pool: PagedKVPool, chunk_size: int, cache: PageCache | None = None) -> None:
        """cache: of that pool; none by default."""
        self.chunk_size = chunk_size
        self.pool = pool
        self.pages = cache or PageCache(pool)
        self._waiting: OrderedDict[JobT, None] = OrderedDict()
        self._running: OrderedDict[JobT, None] = OrderedDict()

    @property
    def queued_tokens(self) -> int:
        """Tokens that are to be computed, as far as is known: a waiting job's prefix may be given up or come."""
        # Copies: heartbeats ask while the owner changes the queues.
        waiting = sum(job.num_tokens - job.cached for job in list(self._waiting))
        return waiting + sum(job.remaining for job in list(self._running))

    @property
    def kv_usage(self) -> float:
        """The part of the pages that jobs hold, from 0 to 1."""
        pool = self.pool
        return max(0, pool.num_pages - pool.free_pages - self.pages.cached_pages) / pool.num_pages

    def fits(self, num_tokens: int) -> bool:
        """Whether that many tokens can ever be computed here."""
        return self.pool.pages_for(num_tokens) <= self.pool.num_pages

    def add(self, job: JobT) -> None:
        job.cached = self.pages.find(job.token_ids.numpy(), job.salt) if job.reuse else 0
        self._waiting[job] = None

    def forget(self, job: JobT) -> None:
        """Compute no more of the job; its pages stay until `release`."""
        self._waiting.pop(job, None)
        self._running.pop(job, None)

    def release(self, job: JobT) -> None:
        """Give the job's pages back, finished or not."""
        self.forget(job)
        if job.lease is not None:
            self.pages.give_back(job.lease)
            job.lease = job.pages = job.cache = None

    def start_waiting(self) -> list[JobT]:
        """Start waiting jobs, in their order, while there are pages. Returns those of which something is left."""
        started = []
        while self._waiting:
            job = next(iter(self._waiting))
            job.lease = self.pages.lend(job.token_ids.numpy(), job.salt, job.reuse)
            if job.lease is None:
                break
            del self._waiting[job]
            self._use_cached(job, job.lease)
            if job.remaining:
                self._running[job] = None
                started.append(job)
        return started

    def mark_cached(self, job: JobT, stop: int) -> None:
        """The first `stop` tokens of a job have KV now, as if they had been computed; they are cached.

        Nothing of the job was computed yet, or what is computed of it now begins there.
        """
        assert job.lease is not None
        job.computed = stop
        self.pages.insert(job.lease, stop)

    def rematch_prefix(self, job: JobT) -> None:
        """Use what was cached since a job started of which nothing was computed."""
        assert job.lease is not None
        if job.reuse and job.computed == job.cached and self.pages.extend(job.lease):
            self._use_cached(job, job.lease)

    def plan(self) -> PrefillStep[JobT] | None:
        """The next step of started jobs, or None if none can go on. Complete it, or release its jobs, before planning
        another."""
        budget = self.chunk_size
        taken = []
        for job in list(self._running):
            if budget == 0:
                break
            if job.is_paused:
                continue
            self.rematch_prefix(job)
            if not job.remaining:
                del self._running[job]
                continue
            length = min(budget, job.remaining)
            budget -= length
            taken.append((job, job.next_chunk(length)))
        return PrefillStep(taken) if taken else None

    def complete(self, step: PrefillStep[JobT], without: Set[JobT] = frozenset()) -> None:
        """Count a step's tokens as computed, and cache them, but for those of these jobs."""
        for job, chunk in step.chunks:
            if job in without:
                continue
            job.computed = chunk.stop
            if job.lease is not None:
                self.pages.insert(job.lease, chunk.stop)
            if not job.remaining:
                self._running.pop(job, None)

    def _use_cached(self, job: JobT, lease: PageLease) -> None:
        """The job goes on after the prefix that its lease has found."""
        job.computed = job.cached = lease.cached
        job.pages, job.cache = lease.pages, PagedSequence(self.pool, lease.pages)


@torch.inference_mode()
def compute_chunks(
    model: SparseModel,
    chunks: Sequence[PrefillChunk],
    wanted: Sequence[int | None],
    on_layer: Callable[[int], None] = lambda _: None,
) -> dict[int, QueuedLogprobs]:
    """Queue a forward pass. Returns the log probabilities that are wanted, by the number of the chunk.

    wanted: of each chunk, how many alternatives to each of the tokens after its own; None for no log probabilities.
    on_layer: called when the kernels that write a layer's KV are queued, and before any that read that layer's KV of
    earlier positions: it may wait for those.
    """
    kv_only = all(alternatives is None for alternatives in wanted)
    computed = model.prefill(chunks, on_layer, kv_only)
    if kv_only:
        return {}
    hidden = torch.split(computed, [len(chunk.token_ids) for chunk in chunks])
    return {
        number: QueuedLogprobs.of(chunk.start + 1, model.logprobs(states, chunk.next_ids, alternatives))
        for number, (chunk, states, alternatives) in enumerate(zip(chunks, hidden, wanted, strict=True))
        if alternatives is not None
    }
