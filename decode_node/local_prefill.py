"""Computes prompts on the decode node: chunks into device pages, then a copy to the host tier."""

from dataclasses import dataclass

import torch

from decode_node.request import Request, RequestState
from engine.chunked import ChunkedPrefill, PrefillJob
from hisparse.coordinator import HiSparseCoordinator
from hisparse.swap_in import StagedKV


@dataclass(eq=False)
class LocalJob(PrefillJob):
    """cached: so many tokens have KV in host memory already. They are computed here all the same, and not copied."""

    request: Request
    cached: int


class LocalPrefill:
    """Owns the requests in states LOCAL_PREFILL and STAGING, and the device pages of their prompts.

    Forward passes are queued behind decode steps, one at a time. The loop never waits for them.
    """

    def __init__(self, prefill: ChunkedPrefill[LocalJob], coordinator: HiSparseCoordinator) -> None:
        self._prefill = prefill
        self._coordinator = coordinator
        self._jobs: dict[str, LocalJob] = {}
        self._staging: dict[str, Request] = {}
        self._queued: torch.cuda.Event | None = None
        """The end of the last forward pass, on a CUDA device."""

    @property
    def has_work(self) -> bool:
        """Whether `step` or `staged` has something to do. Aborted copies end in `staged`, too."""
        return bool(self._jobs or self._coordinator.num_staging)

    @property
    def is_idle(self) -> bool:
        pool = self._prefill.pool
        return not self.has_work and pool.free_pages == pool.num_pages

    def fits(self, num_tokens: int) -> bool:
        return self._prefill.fits(num_tokens)

    def start(self, request: Request, cached: int = 0) -> None:
        """Compute the prompt of a request that holds host slots for it. cached: so many of them have their KV."""
        request.move(RequestState.LOCAL_PREFILL)
        job = LocalJob(torch.tensor(request.tokens[:-1]), request, cached)
        self._jobs[request.request_id] = job
        self._prefill.add(job)

    def cancel(self, request: Request) -> bool:
        """Give up a computing or staging request. Whether the caller must release its host slots."""
        if request.state is RequestState.STAGING:
            del self._staging[request.request_id]
            self._coordinator.abort_staging_request(request.request_id)
            request.host_slots = None
            return False
        self._prefill.release(self._jobs.pop(request.request_id))
        return True

    def step(self) -> None:
        """Queue one chunk, unless the one before is still being computed. Finished prompts are copied to the host."""
        if self._queued is not None and not self._queued.query():  # type: ignore[no-untyped-call]
            return
        if (step := self._prefill.plan()) is None:
            return
        self._prefill.compute(step)
        if self._prefill.pool.kv.is_cuda:
            self._queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._queued.record()
        self._prefill.complete(step)
        for job, _ in step.chunks:
            if not job.remaining:
                self._stage(self._jobs.pop(job.request.request_id))

    def staged(self) -> tuple[list[Request], list[tuple[Request, Exception]]]:
        """Requests whose copy has ended: those that landed and own their host slots again, and those whose copy failed,
        which the caller must end."""
        staged = self._coordinator.poll_staging()
        landed = [self._staging.pop(request_id) for request_id in staged.landed]
        for request in landed:
            request.move(RequestState.LANDED)
        return landed, [(self._staging[request_id], error) for request_id, error in staged.failed.items()]

    def _stage(self, job: LocalJob) -> None:
        assert job.cache is not None
        request, pool = job.request, self._prefill.pool
        assert request.host_slots is not None
        staged = StagedKV(
            kv_rows=list(pool.kv),
            index_rows=list(pool.index_keys),
            rows=job.cache.rows(job.cached, job.num_tokens),
            release=lambda: self._prefill.release(job),
        )
        request.move(RequestState.STAGING)
        self._staging[request.request_id] = request
        self._coordinator.admit_request_into_staging(
            request.request_id, request.host_slots, staged, job.num_tokens, job.cached
        )
