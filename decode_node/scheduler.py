"""Which request computes when, and which gives way: the decode node's policy.

One loop owns every request. A turn reads: start prefills, admit what has landed, make room, decode one token each.
Requests are kept in order of arrival; the oldest goes first everywhere and the youngest gives way.
"""

import time
from dataclasses import dataclass

import structlog
import torch

from base.metrics import Metrics
from base.tombstones import Tombstones
from control.messages import FinishReason, Generate, Peer, Rejected, Token
from decode_node.attempt import Landed, Lost, Outcome
from decode_node.local_prefill import LocalPrefill
from decode_node.outputs import OutputStream
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import Request, State
from engine.convert import token_message
from engine.decoding import Decoding
from engine.sampling import NotSampled, sample
from hisparse.coordinator import HOST_GRANULE, HiSparseCoordinator, Tier

log = structlog.get_logger(__name__)

RETRY_S = 0.5
"""How long a request waits before it goes to a node that has failed it; twice as long each further time."""
LONGEST_RETRY_S = 2.0
_HOLDS_HOST_SLOTS = (State.LANDED, State.RUNNING, State.RETRACTED)


@dataclass(frozen=True)
class Limits:
    """What a decode node takes on. max_waiting: requests that hold nothing yet; beyond it they are rejected."""

    context_length: int
    vocab_size: int
    max_running: int
    max_waiting: int
    prefill_retries: int


class Scheduler:
    """Owns the requests of a decode node. Not thread safe: the node's loop calls it."""

    def __init__(
        self,
        decoding: Decoding,
        coordinator: HiSparseCoordinator,
        remote: RemotePrefill,
        local: LocalPrefill | None,
        outputs: OutputStream,
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self._decoding = decoding
        self._coordinator = coordinator
        self._remote = remote
        self._local = local
        self._outputs = outputs
        self._metrics = metrics
        self._limits = limits
        self.requests: dict[str, Request] = {}
        self._ended: Tombstones[str] = Tombstones()
        self._decoded: set[str] = set()
        """Ids of those that were in a step since `take_decoded`."""
        self._draining = False

    # --- what comes in ---

    def add(self, generate: Generate, gateway: Peer) -> Rejected | None:
        """Queue a request, or say why not. A repeated message changes nothing, also when the request is over."""
        if generate.request_id in self.requests or generate.request_id in self._ended:
            return None
        request = Request(generate, gateway)
        if refusal := self._refusal(request):
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
        self.requests[generate.request_id] = request
        log.info(
            "queued",
            request_id=generate.request_id,
            prompt_tokens=len(generate.prompt_ids),
            max_new_tokens=generate.max_new_tokens,
        )
        return None

    def _queue_has_room(self) -> bool:
        """Whether another request may wait. Those that need not wait any longer are sent on first."""
        if len(self.in_state(State.WAITING)) >= self._limits.max_waiting:
            self._start_prefills()
        return len(self.in_state(State.WAITING)) < self._limits.max_waiting

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

    def apply(self, outcomes: list[Outcome]) -> None:
        """Take the results of remote prefills. First tokens go out now: the next step may take a while."""
        for outcome in outcomes:
            match outcome:
                case Landed(request, token) if token.token_id >= self._limits.vocab_size:
                    self.end(request, "error", f"the prefill node sampled {token.token_id}, which is no token")
                case Landed(request, token):
                    self._emit(request, token)
                case Lost(request, reason):
                    self._retry(request, reason)
        self._outputs.flush()

    # --- a turn of the loop ---

    @property
    def has_work(self) -> bool:
        """Whether the next turn computes something, or must not wait for a message."""
        ready = (State.RUNNING, State.LANDED, State.RETRACTED)
        return any(r.state in ready for r in self.requests.values()) or bool(self._local and self._local.has_work)

    def turn(self) -> None:
        self._start_prefills()
        self._advance_local_prefill()
        self._admit()
        self._decode(self._make_room())
        self._outputs.flush()

    def _start_prefills(self) -> None:
        """Give waiting requests host slots and a place to be prefilled, oldest first."""
        for request in self.in_state(State.WAITING):
            node = self._remote.choose(request)
            local = self._local if node is None and self._local and self._local.fits(request.num_tokens) else None
            if node is None and local is None:
                # Nobody for this one: a shorter prompt may have a node.
                continue
            if node is not None and node.boot_id in request.tried and time.monotonic() < request.again_at:
                continue
            slots = None
            if self._coordinator.host.free - request.num_tokens >= self._host_growth_reserve():
                slots = self._coordinator.host.allocate(request.num_tokens)
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
            failed = self._local.step()
        except Exception as error:
            log.exception("local prefill failed")
            failed = [(request, str(error)) for request in self.in_state(State.LOCAL_PREFILL)]
        for request, reason in failed:
            self.end(request, "error", f"prefill failed: {reason}")
        landed, broken = self._local.staged()
        for request, token in landed:
            log.info("staged", request_id=request.request_id, tokens=request.num_tokens)
            self._emit(request, token)
        for request, failure in broken:
            self.end(request, "error", f"copying the prompt's KV to host memory failed: {failure}")
        self._outputs.flush()

    def _admit(self) -> None:
        """Give device slots to requests whose KV is in host memory, oldest first; nobody overtakes."""
        for request in self.in_state(State.LANDED, State.RETRACTED):
            if self._coordinator.num_running >= self._limits.max_running:
                return
            device = self._coordinator.device
            if device.free_slots - device.slots_for(request.kv_tokens) < device.growth_reserve():
                return
            assert request.host_slots is not None
            if not self._coordinator.admit_request_direct(request.request_id, request.host_slots, request.kv_tokens):
                return
            request.host_slots = None
            log.info("admitted", request_id=request.request_id, kv_tokens=request.kv_tokens, was=request.state.value)
            request.move(State.RUNNING)

    def _make_room(self) -> list[Request]:
        """The running requests, each with room for one more token. The youngest give way until there is room."""
        while running := self.in_state(State.RUNNING):
            result = self._coordinator.append_tokens([request.request_id for request in running])
            if not result.short_of:
                break
            if Tier.DEVICE in result.short_of.values():
                self._retract(running[-1])
            else:
                self._drop(self.in_state(*_HOLDS_HOST_SLOTS)[-1])
        return running

    def _retract(self, request: Request) -> None:
        """Take its device slots. Its KV stays on the host and it resumes by another direct admission."""
        request.host_slots = self._coordinator.retract_request(request.request_id)
        request.move(State.RETRACTED)
        self._metrics.retractions.labels("device").inc()
        log.info("retracted", request_id=request.request_id, kv_tokens=request.kv_tokens)

    def _drop(self, request: Request) -> None:
        """Take its host slots too: it is prefilled again later, with the tokens that it has emitted."""
        log.info("dropped for want of host slots", request_id=request.request_id, kv_tokens=request.kv_tokens)
        self._release(request)
        request.move(State.WAITING)
        self._metrics.retractions.labels("host").inc()

    @torch.inference_mode()
    def _decode(self, batch: list[Request]) -> None:
        """One token for each request of the batch."""
        if not batch:
            return
        self._metrics.decode_batch_size.observe(len(batch))
        self._decoded.update(request.request_id for request in batch)
        try:
            logits = self._decoding.step(
                [request.request_id for request in batch], [request.generated[-1] for request in batch]
            )
            results = sample(logits, [r.sampling for r in batch], [len(r.generated) for r in batch])
        except Exception as error:
            # Whatever broke the step would break it again: those who were in it end, others go on.
            log.exception("decode step failed", batch=len(batch))
            for request in batch:
                self.end(request, "error", f"decode step failed: {error}")
            return
        for request, result in zip(batch, results, strict=True):
            if isinstance(result, NotSampled):
                self.end(request, "error", f"decode step failed: {result.reason}")
            else:
                self._emit(request, token_message(result))

    def _emit(self, request: Request, token: Token) -> None:
        """Append a token, stream it, and end the request if it was the last."""
        request.generated.append(token.token_id)
        reason = request.finish_reason()
        self._outputs.token(request, token, reason)
        if reason is not None:
            self._close(request, reason)

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

    def _close(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self._release(request)
        request.move(State.FINISHED)
        del self.requests[request.request_id]
        self._ended.add(request.request_id)
        log.info("finished", request_id=request.request_id, reason=reason, tokens=len(request.generated), error=error)

    def _release(self, request: Request) -> None:
        """The one release path: give back whatever the request's state says it holds."""
        match request.state:
            case State.PREFILLING:
                self._remote.abandon(request)
            case State.RUNNING:
                self._coordinator.request_finished(request.request_id)
            case State.LANDED | State.RETRACTED:
                self._release_host(request)
            case State.LOCAL_PREFILL | State.STAGING:
                assert self._local is not None
                if self._local.cancel(request):
                    self._release_host(request)

    def _release_host(self, request: Request) -> None:
        assert request.host_slots is not None
        self._coordinator.host.release(request.host_slots)
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

    def take_decoded(self) -> list[Request]:
        """Requests that decoded since the last call and are not over, oldest first; some may have been retracted."""
        decoded, self._decoded = self._decoded, set()
        return [request for request in self.requests.values() if request.request_id in decoded]

    def in_state(self, *states: State) -> list[Request]:
        """Requests in these states, oldest first."""
        return [request for request in self.requests.values() if request.state in states]

    @property
    def outstanding_tokens(self) -> int:
        """KV tokens that this node's requests hold or will come to hold."""
        return sum(request.most_kv_tokens for request in list(self.requests.values()))

    @property
    def holds_something(self) -> bool:
        """Requests, or slots that are still written to after one that was given up."""
        return bool(self.requests) or not self._remote.is_idle or self._coordinator.num_staging > 0

    def check_idle(self) -> None:
        """When nothing is held, every pool must be as full as at start. Raises RuntimeError if not."""
        if self.holds_something:
            return
        if not self._coordinator.is_idle() or (self._local is not None and not self._local.is_idle):
            raise RuntimeError("slots are in use although there is no request: they leaked")

    def _refusal(self, request: Request) -> str | None:
        """Why the request could never run here, or None."""
        generate, limits = request.generate, self._limits
        total = len(generate.prompt_ids) + generate.max_new_tokens
        if total > limits.context_length:
            return (
                f"{len(generate.prompt_ids)} prompt tokens and max_tokens {generate.max_new_tokens} exceed "
                f"the context of {limits.context_length} tokens"
            )
        if request.most_kv_tokens > self._coordinator.host.num_slots:
            return f"{request.most_kv_tokens} tokens of KV exceed the host pool of {self._coordinator.host.num_slots}"
        if max(generate.prompt_ids) >= limits.vocab_size:
            return f"token id {max(generate.prompt_ids)} is outside the vocabulary of {limits.vocab_size}"
        return None
