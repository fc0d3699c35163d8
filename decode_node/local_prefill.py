"""Computes prompts on the decode node: chunks into device pages, then a copy to the host tier."""

from dataclasses import dataclass, field

import structlog
import torch

from base.device import check_device
from control.prompt_logprobs import PromptLogprobTable
from decode_node.request import Request, RequestState
from engine.chunked import ChunkedPrefill, PrefillJob, PrefillStep, QueuedLogprobs
from hisparse.coordinator import HiSparseCoordinator
from hisparse.swap_in import StagedKV
from model.sparse_model import SparseModel

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class LocalJob(PrefillJob):
    """on_host: tokens whose KV is in host memory already. They are computed here all the same, and not copied."""

    request: Request
    on_host: int
    logprobs: PromptLogprobTable | None = None
    """Where those of the prompt are collected, if they are asked for."""
    queued: list[QueuedLogprobs] = field(default_factory=list)
    """Log probabilities on their way to the host."""


class LocalPrefill:
    """Owns the requests in states LOCAL_PREFILL and STAGING, and the device pages of their prompts.

    Forward passes are queued after decode steps, one at a time. The loop never waits for them.
    """

    def __init__(self, model: SparseModel, prefill: ChunkedPrefill[LocalJob], coordinator: HiSparseCoordinator) -> None:
        self._model = model
        self._prefill = prefill
        self._coordinator = coordinator
        self._jobs: dict[str, LocalJob] = {}
        self._queued: torch.cuda.Event | None = None
        """The end of the last forward pass, on a CUDA device."""

    @property
    def has_work(self) -> bool:
        """Whether `step` or `staged` has something to do. Aborted copies end in `staged`, too."""
        return bool(self._jobs or len(self._coordinator.staging))

    @property
    def is_idle(self) -> bool:
        pool = self._prefill.pool
        return not self.has_work and pool.free_pages == pool.num_pages

    def fits(self, num_tokens: int) -> bool:
        return self._prefill.fits(num_tokens)

    def start(self, request: Request, on_host: int = 0) -> None:
        """Compute the prompt of a request that holds host slots for it. on_host: tokens that have their KV."""
        request.move(RequestState.LOCAL_PREFILL)
        table = request.logprobs_to_compute()
        job = LocalJob(
            torch.tensor(request.tokens),
            request,
            on_host,
            table,
            prompt_logprobs=None if table is None else request.generate.prompt_logprobs,
        )
        self._jobs[request.request_id] = job
        self._prefill.add(job)

    def cancel(self, request: Request) -> bool:
        """Give up a computing or staging request. Whether the caller must release its host slots."""
        job = self._jobs.pop(request.request_id)
        if request.state is RequestState.STAGING:
            self._coordinator.staging.abort(request.request_id)
            request.host_slots = None
            return False
        self._prefill.release(job)
        return True

    def step(self) -> list[tuple[Request, str]]:
        """Queue one chunk, unless the one before is still being computed. Finished prompts are copied to the host.

        Returns requests that an error has cost, which the caller must end, and why. Raises DeviceFailed.
        """
        if self._queued is not None and not self._queued.query():  # type: ignore[no-untyped-call]
            return []
        at_risk = list(self._jobs.values())
        try:
            self._prefill.start_waiting()
            if (step := self._prefill.plan()) is not None:
                at_risk = [job for job, _ in step.chunks]
                self._compute(step)
        except Exception as error:
            log.exception("local prefill failed")
            check_device(self._prefill.pool.kv.device)
            failed = [job.request for job in at_risk if job.request.state is RequestState.LOCAL_PREFILL]
            return [(request, f"prefill failed: {error}") for request in failed]
        return []

    def _compute(self, step: PrefillStep[LocalJob]) -> None:
        for job, queued in step.compute(self._model).items():
            job.queued.append(queued)
        if self._prefill.pool.kv.is_cuda:
            self._queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._queued.record()
        self._prefill.complete(step)
        for job, _ in step.chunks:
            if not job.remaining:
                self._stage(job)

    def staged(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests whose copy has ended: those that landed and own their host slots again, and those whose copy failed,
        which the caller must end, and why."""
        staged = self._coordinator.staging.poll()
        landed = []
        failed = [
            (self._jobs[request_id].request, f"copying the prompt's KV to host memory failed: {error}")
            for request_id, error in staged.failed.items()
        ]
        for request_id in staged.landed:
            job = self._jobs.pop(request_id)
            job.request.move(RequestState.LANDED)
            if reason := _take_logprobs(job):
                failed.append((job.request, f"prefill failed: {reason}"))
            else:
                landed.append(job.request)
        return landed, failed

    def _stage(self, job: LocalJob) -> None:
        assert job.cache is not None
        request, pool = job.request, self._prefill.pool
        assert request.host_slots is not None
        staged = StagedKV(
            kv_rows=list(pool.kv),
            index_rows=list(pool.index_keys),
            rows=job.cache.rows(job.on_host, job.num_tokens),
            release=lambda: self._prefill.release(job),
        )
        self._coordinator.admit_request_into_staging(
            request.request_id, request.host_slots, staged, job.num_tokens, job.on_host
        )
        request.move(RequestState.STAGING)


def _take_logprobs(job: LocalJob) -> str | None:
    """Give a landed request the log probabilities of its prompt, or say why that is not possible. Waits for nothing:
    they were queued before the copy that has ended."""
    if job.logprobs is None:
        return None
    for queued in job.queued:
        piece = queued.wait()
        if reason := job.logprobs.rejection_reason(piece):
            return reason
        job.logprobs.add(piece)
    job.request.prompt_logprobs = job.logprobs
    return None
