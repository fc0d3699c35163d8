"""Scheduling policy of the decode node: order of prefill, admission, preemption, and what each step computes.

One loop owns every request. A turn reads: start prefills, admit what has landed, make room, launch a step, take the
tokens of the step before. Requests are kept in order of arrival: the oldest goes first everywhere, the youngest gives
way, and the first never does.
"""

import time
from collections.abc import Sequence

import structlog

from base.metrics import Metrics
from base.tombstones import Tombstones
from control.messages import FinishReason, Generate, Peer, Rejected, Token
from decode_node.attempt import Landed, Lost, PrefillOutcome
from decode_node.limits import Limits
from decode_node.local_prefill import LocalPrefill
from decode_node.outputs import OutputStream
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import Request, RequestState
from decode_node.stepper import Stepper
from engine.runner import ModelRunner
from hisparse.coordinator import HOST_GRANULE, HiSparseCoordinator, Tier
from hisparse.extents import HostSlots

log = structlog.get_logger(__name__)

RETRY_S = 0.5
"""How long a request waits before it goes to a node that has failed it; twice as long each further time."""
LONGEST_RETRY_S = 2.0
_HOLDS_HOST_SLOTS = (
    RequestState.PREFILLING,
    RequestState.LOCAL_PREFILL,
    RequestState.STAGING,
    RequestState.LANDED,
    RequestState.RUNNING,
    RequestState.RETRACTED,
)


class Scheduler:
    """Owns the requests of a decode node. Not thread safe: the node's loop calls it.

    While the device computes a step, the loop takes the tokens of the one before and prepares the next. So a request
    that ends is in one more step for nothing: its token is dropped. One that gives way keeps the token that it was
    about to get.
    """

    def __init__(
        self,
        runner: ModelRunner,
        coordinator: HiSparseCoordinator,
        remote: RemotePrefill,
        local: LocalPrefill | None,
        outputs: OutputStream,
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self._runner = runner
        self._coordinator = coordinator
        self._remote = remote
        self._local = local
        self._outputs = outputs
        self._metrics = metrics
        self._limits = limits
        self.requests: dict[str, Request] = {}
        self._ended: Tombstones[str] = Tombstones()
        self._steps = Stepper(runner, coordinator, metrics, self._step_failed)
        self._stalled = False
        """Whether the last turn could do nothing for any request that has landed."""
        self._draining = False

    # --- what comes in ---

    def add(self, generate: Generate, gateway: Peer) -> Rejected | None:
        """Queue a request, or say why not. A repeated message changes nothing, also when the request is over."""
        if generate.request_id in self.requests or generate.request_id in self._ended:
            return None
        if refusal := self._limits.refusal(generate):
            return Rejected(request_id=generate.request_id, code="too_long", reason=refusal)
        if self._draining:
            return Rejected(request_id=generate.request_id, code="draining", reason="the decode node is draining")
        if not self._queue_has_room():
            return Rejected(
                request_id=generate.request_id,
                code="queue_full",
                reason=f"{self._limits.max_waiting} requests are waiting already",
                retry_after=1.0,
            )
        self.requests[generate.request_id] = Request(generate, gateway)
        log.info(
            "queued",
            request_id=generate.request_id,
            prompt_tokens=len(generate.prompt_ids),
            max_new_tokens=generate.max_new_tokens,
        )
        return None

    def _queue_has_room(self) -> bool:
        """Whether another request may wait. Those that need not wait any longer are sent on first."""
        if len(self.in_state(RequestState.WAITING)) >= self._limits.max_waiting:
            self._start_prefills()
        return len(self.in_state(RequestState.WAITING)) < self._limits.max_waiting

    def cancel(self, request_id: str, gateway: Peer) -> None:
        """The client left. A request that is unknown or over is answered just the same."""
        if request := self.requests.get(request_id):
            self.end(request, "abort")
        else:
            self._outputs.unknown(request_id, gateway)

    def ended(self, request_id: str, gateway: Peer) -> None:
        """The gateway knows that the request is over."""
        self._outputs.ended(request_id, gateway)

    def resend(self, request_id: str, start: int, gateway: Peer) -> None:
        """The gateway has missed tokens from that index on."""
        self._outputs.resend(request_id, start, gateway)

    def apply(self, outcomes: list[PrefillOutcome]) -> None:
        """Take the results of remote prefills."""
        for outcome in outcomes:
            match outcome:
                case Landed():
                    self._stalled = False
                case Lost(request, reason):
                    self._retry(request, reason)
        self._outputs.flush()

    # --- a turn of the loop ---

    @property
    def has_work(self) -> bool:
        """Whether the next turn computes something, or must not wait for a message."""
        if not self._steps.is_idle or (self._local is not None and self._local.has_work):
            return True
        ready = (RequestState.RUNNING, RequestState.LANDED, RequestState.RETRACTED)
        return not self._stalled and any(request.state in ready for request in self.requests.values())

    def turn(self) -> None:
        """Raises DeviceFailed if the device does not work any more."""
        self._start_prefills()
        self._advance_local_prefill()
        admitted = self._admit()
        self._steps.launch(self._make_room())
        taken = self._steps.take()
        for request_id, token in taken:
            self._take_token(request_id, token)
        self._steps.sample()
        self._stalled = not admitted and not taken and self._steps.is_idle
        self._outputs.flush()

    def _start_prefills(self) -> None:
        """Give waiting requests host slots and a place to be prefilled, oldest first."""
        for request in self.in_state(RequestState.WAITING):
            if not request.kv_tokens:
                # A prompt of one token: its KV is that of its first step.
                request.host_slots = HostSlots(())
                request.move(RequestState.LANDED)
                continue
            node = self._remote.choose(request)
            local = self._local if node is None and self._local and self._local.fits(request.kv_tokens) else None
            if node is None and local is None:
                # Nobody for this one: a shorter prompt may have a node.
                continue
            if node is not None and node.boot_id in request.tried and time.monotonic() < request.again_at:
                continue
            slots = None
            if self._coordinator.host.free - request.kv_tokens >= self._host_growth_reserve():
                slots = self._coordinator.host.allocate(request.kv_tokens)
            if slots is None:
                return
            if node is not None:
                self._remote.dispatch(request, node, slots)
            elif local is not None:
                request.host_slots = slots
                local.start(request)

    def _host_growth_reserve(self) -> int:
        """Host slots to leave to those that decode, so that they do not push a newcomer out at once."""
        return HOST_GRANULE * self._coordinator.num_running

    def _advance_local_prefill(self) -> None:
        if self._local is None or not self._local.has_work:
            return
        try:
            self._local.step()
        except Exception as error:
            log.exception("local prefill failed")
            self._runner.check_device()
            for request in self.in_state(RequestState.LOCAL_PREFILL):
                self.end(request, "error", f"prefill failed: {error}")
        landed, broken = self._local.staged()
        for request in landed:
            log.info("staged", request_id=request.request_id, tokens=request.kv_tokens)
        for request, failure in broken:
            self.end(request, "error", f"copying the prompt's KV to host memory failed: {failure}")

    def _admit(self) -> bool:
        """Give device slots to requests whose KV is in host memory, oldest first; nobody overtakes. Whether any got
        some."""
        admitted = False
        for request in self.in_state(RequestState.LANDED, RequestState.RETRACTED):
            if self._coordinator.num_running >= self._limits.max_running:
                break
            device = self._coordinator.device
            if device.free_slots - device.slots_for(request.kv_tokens) < device.growth_reserve():
                break
            assert request.host_slots is not None
            if not self._coordinator.admit_request_direct(request.request_id, request.host_slots, request.kv_tokens):
                break
            self._runner.admit(request.request_id, request.newest_token, request.generate.sampling)
            request.host_slots = None
            log.info("admitted", request_id=request.request_id, kv_tokens=request.kv_tokens, was=request.state.value)
            request.move(RequestState.RUNNING)
            admitted = True
        return admitted

    # --- who computes, and who gives way ---

    def _make_room(self) -> list[Request]:
        """The running requests that compute a token now, each with room for it, oldest first.

        The youngest give way until the others have room. Where the room is on its way, in quarantine or behind a step,
        those without it sit out.
        """
        while True:
            wanting = [request for request in self.in_state(RequestState.RUNNING) if request.wants_step]
            result = self._coordinator.append_tokens([request.request_id for request in wanting])
            if not result.short_of:
                return wanting
            ready = [request for request in wanting if request.request_id not in result.short_of]
            if Tier.DEVICE in result.short_of.values():
                self._retract(self.in_state(RequestState.RUNNING)[-1])
            elif not self._free_host_slots(len(result.short_of), can_wait=bool(ready)):
                return ready

    def _free_host_slots(self, short: int, can_wait: bool) -> bool:
        """Have the youngest request that holds host slots give them up for that many others which lack some.

        False if nobody has to: as many slots are on their way, and others can go on meanwhile; or there is nobody but
        the first.
        """
        on_their_way = self._remote.quarantined_slots + self._coordinator.releasing_slots
        _, *others = self.in_state(*_HOLDS_HOST_SLOTS)
        if not others or (can_wait and on_their_way >= short):
            return False
        self._drop(others[-1])
        return True

    def _retract(self, request: Request) -> None:
        """Take its device slots. Its KV stays on the host and it resumes by another direct admission."""
        request.host_slots = self._coordinator.retract_request(request.request_id)
        request.move(RequestState.RETRACTED)
        self._metrics.retractions.labels("device").inc()
        log.info("retracted", request_id=request.request_id, kv_tokens=request.kv_tokens)

    def _drop(self, request: Request) -> None:
        """Take its host slots: it is prefilled again later, with the tokens that it has emitted."""
        log.info(
            "gives its host slots up",
            request_id=request.request_id,
            kv_tokens=request.kv_tokens,
            was=request.state.value,
        )
        self._release(request)
        request.move(RequestState.WAITING)
        self._metrics.retractions.labels("host").inc()

    # --- tokens ---

    def _take_token(self, request_id: str, token: Token | None) -> None:
        """A step has computed this request's next token."""
        request = self.requests.get(request_id)
        if request is None:
            return  # it ended while the step was in flight
        if token is None:
            self.end(request, "error", "decode step failed: the model's logits are not finite numbers")
            return
        request.generated.append(token.token_id)
        reason = request.finish_reason()
        self._outputs.token(request, token, reason)
        if reason is not None:
            self._close(request, reason)

    def _step_failed(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            if request := self.requests.get(request_id):
                self.end(request, "error", f"decode step failed: {error}")

    # --- endings ---

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request before its time and tell its gateway."""
        self._outputs.end(request, reason, error)
        self._close(request, reason, error)

    def hand_over(self, reason: str) -> None:
        """Take nothing new from now on, and give up what has streamed nothing: gateways try another node at once."""
        self._draining = True
        for request in list(self.requests.values()):
            if not request.generated:
                self.end(request, "abort", reason)
        self._outputs.flush()

    def end_all(self, reason: str) -> None:
        """Give up everything. An abort, not an error: where no token was streamed, gateways try another node."""
        for request in list(self.requests.values()):
            self.end(request, "abort", reason)
        self._outputs.flush()

    def fail_all(self, error: str) -> None:
        """Tell every gateway that its requests failed, and release nothing: the device cannot be asked any more."""
        for request in self.requests.values():
            self._outputs.end(request, "error", error)
        self._outputs.flush()

    def _close(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self._release(request)
        request.move(RequestState.FINISHED)
        del self.requests[request.request_id]
        self._ended.add(request.request_id)
        log.info("finished", request_id=request.request_id, reason=reason, tokens=len(request.generated), error=error)

    def _release(self, request: Request) -> None:
        """The one release path: give back whatever the request's state says it holds."""
        match request.state:
            case RequestState.PREFILLING:
                self._remote.abandon(request)
            case RequestState.RUNNING:
                self._coordinator.request_finished(request.request_id)
            case RequestState.LANDED | RequestState.RETRACTED:
                self._release_host(request)
            case RequestState.LOCAL_PREFILL | RequestState.STAGING:
                assert self._local is not None
                if self._local.cancel(request):
                    self._release_host(request)

    def _release_host(self, request: Request) -> None:
        assert request.host_slots is not None
        self._coordinator.release_host(request.host_slots)
        request.host_slots = None

    def _retry(self, request: Request, reason: str) -> None:
        """A prefill attempt was lost: the request waits for another one, unless it had enough."""
        if request.prefill_attempts > self._limits.prefill_retries:
            self.end(request, "error", f"prefill failed {request.prefill_attempts} times, at last: {reason}")
        else:
            self._metrics.prefill_retries.inc()
            pause = RETRY_S * 2 ** max(0, request.prefill_attempts - 1)
            request.again_at = time.monotonic() + min(pause, LONGEST_RETRY_S)

    # --- what it holds ---

    def take_stepped(self) -> list[Request]:
        """Requests that were in a step since the last call and are not over, oldest first; some may have been
        retracted."""
        stepped = self._steps.take_stepped()
        return [request for request in self.requests.values() if request.request_id in stepped]

    def in_state(self, *states: RequestState) -> list[Request]:
        """Requests in these states, oldest first."""
        return [request for request in self.requests.values() if request.state in states]

    @property
    def outstanding_tokens(self) -> int:
        """KV tokens that this node's requests hold or will come to hold."""
        return sum(request.most_kv_tokens for request in list(self.requests.values()))

    @property
    def holds_something(self) -> bool:
        """Requests, or slots that are still written to after one that was given up."""
        return (
            bool(self.requests)
            or not self._steps.is_idle
            or not self._remote.is_idle
            or self._coordinator.num_staging > 0
        )

    def check_idle(self) -> None:
        """When nothing is held, every pool must be as full as at start. Raises RuntimeError if not."""
        if self.holds_something:
            return
        if not self._coordinator.is_idle() or (self._local is not None and not self._local.is_idle):
            raise RuntimeError("slots are in use although there is no request: they leaked")
