"""Prompts that the decode node computes itself: chunks into device pages, then a copy to the host tier."""

from control.messages import Token
from decode_node.request import Request, State
from engine.chunked import ChunkedPrefill, PrefillJob
from engine.convert import prompt_tensor, token_message
from hisparse.coordinator import HiSparseCoordinator
from hisparse.swap_in import StagedKV


class LocalPrefill:
    """Owns the requests in states LOCAL_PREFILL and STAGING, and the device pages that their prompts lie in."""

    def __init__(self, prefill: ChunkedPrefill[str], coordinator: HiSparseCoordinator) -> None:
        self._prefill = prefill
        self._coordinator = coordinator
        self._jobs: dict[str, tuple[Request, PrefillJob[str]]] = {}
        self._staging: dict[str, tuple[Request, Token]] = {}

    @property
    def has_work(self) -> bool:
        """Whether `step` and `staged` have something to do: also for aborted copies, which end in `staged`."""
        return bool(self._jobs or self._coordinator.num_staging)

    @property
    def is_idle(self) -> bool:
        pool = self._prefill.pool
        return not self.has_work and pool.free_pages == pool.num_pages

    def fits(self, num_tokens: int) -> bool:
        return self._prefill.fits(num_tokens)

    def start(self, request: Request) -> None:
        """Compute a request that holds host slots for its tokens."""
        job = PrefillJob(
            request.request_id, prompt_tensor(request.tokens), request.sampling, step=len(request.generated)
        )
        request.move(State.LOCAL_PREFILL)
        self._jobs[request.request_id] = request, job
        self._prefill.add(job)

    def cancel(self, request: Request) -> bool:
        """Give a computing or staging request up. Whether its host slots are still the caller's to release."""
        if request.state is State.STAGING:
            del self._staging[request.request_id]
            self._coordinator.abort_staging_request(request.request_id)
            request.host_slots = None
            return False
        _, job = self._jobs.pop(request.request_id)
        self._prefill.release(job)
        return True

    def step(self) -> list[tuple[Request, str]]:
        """Compute one chunk; what it completes starts its copy to the host.

        Returns the requests that cannot go on, for the caller to end, and why.
        """
        failed = []
        for computed in self._prefill.step():
            if computed.failure is not None:
                failed.append((self._jobs[computed.job.key][0], computed.failure))
            elif computed.token is not None:
                request, job = self._jobs.pop(computed.job.key)
                self._stage(request, job, token_message(computed.token))
        return failed

    def staged(self) -> tuple[list[tuple[Request, Token]], list[tuple[Request, Exception]]]:
        """Requests whose copy is over: those that landed, with their first token, and those whose copy failed.

        The former have their host slots back. The latter hold nothing and are for the caller to end.
        """
        staged = self._coordinator.poll_staging()
        landed = [self._staging.pop(request_id) for request_id in staged.landed]
        for request, _ in landed:
            request.move(State.LANDED)
        return landed, [(self._staging[request_id][0], error) for request_id, error in staged.failed.items()]

    def _stage(self, request: Request, job: PrefillJob[str], token: Token) -> None:
        assert job.cache is not None
        assert request.host_slots is not None
        pool = self._prefill.pool
        staged = StagedKV(
            kv_rows=list(pool.kv),
            index_rows=list(pool.index_keys),
            rows=job.cache.rows(0, len(job.prompt_ids)),
            release=lambda: self._prefill.release(job),
        )
        request.move(State.STAGING)
        self._staging[request.request_id] = request, token
        self._coordinator.admit_request_into_staging(
            request.request_id, request.host_slots, staged, len(job.prompt_ids)
        )
