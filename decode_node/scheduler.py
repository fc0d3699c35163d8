"""Scheduling policy of the decode node: order of prefill, admission, and what each step computes.

One loop owns every request. Requests are kept in one order (`RequestTable`): the first goes first everywhere, the last
gives way (`slots.py`), and the first never does.
"""

import time
from collections.abc import Sequence

import structlog

from base.block_hashes import BLOCK_TOKENS
from base.metrics import Metrics
from base.tombstones import REMEMBERED, LatestDict
from base.tracing import NO_TRACER, Tracer
from control.messages import FinishReason, Generate, Peer, Rejected
from decode_node import spans
from decode_node.grammars import Grammars
from decode_node.local_prefill import LocalPrefill
from decode_node.outputs import OutputStream
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import Limits, Request, RequestState, RequestTable
from decode_node.slots import SlotManager
from decode_node.stepper import Stepper
from engine.grammar import GrammarViolation
from engine.runner import Computed, ModelRunner
from engine.sampling import NoToken
from hisparse.coordinator import HiSparseCoordinator
from ranks.group import Ranks

log = structlog.get_logger(__name__)

RETRY_S = 0.5
"""How long a request waits before it goes to a node that has failed it; twice as long each further time."""
LONGEST_RETRY_S = 2.0


class Scheduler:
    """Owns the requests of a decode node. Not thread safe: the node's loop calls it.

    While the device computes a step, the loop takes the tokens of the step before and prepares the next. So a request
    that ends is in one more step, whose token is dropped. A request that gives way keeps the token that it
    was about to get.
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
        grammars: Grammars,
        ranks: Ranks,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.requests = RequestTable()
        self.outputs = outputs
        self.slots = SlotManager(self.requests, coordinator, remote, local, metrics)
        self._runner = runner
        self._coordinator = coordinator
        self._remote = remote
        self._local = local
        self._metrics = metrics
        self._limits = limits
        self._grammars = grammars
        self._tracer = tracer
        self._steps = Stepper(runner, coordinator, metrics, grammars, self._step_failed, ranks)
        self._ended: LatestDict[str, None] = LatestDict(REMEMBERED)
        self._stalled = False
        """Whether the last turn could do nothing for any request that has landed."""
        self._draining = False

    # --- messages of gateways and lost attempts ---

    def add(self, generate: Generate, gateway: Peer) -> Rejected | None:
        """Queue a request, or say why not. A repeated message changes nothing, even after the request has ended."""
        request_id = generate.request_id
        if request_id in self.requests or request_id in self._ended:
            return None
        if reason := self._limits.rejection_reason(generate):
            return Rejected(request_id=request_id, code="too_long", reason=reason)
        if self._draining:
            return Rejected(request_id=request_id, code="draining", reason="the decode node is draining")
        if self.requests.has_waiting(self._limits.max_waiting):
            # Some of them may not need to wait any longer.
            self._start_prefills()
        if self.requests.has_waiting(self._limits.max_waiting):
            reason = f"{self._limits.max_waiting} requests are waiting already"
            return Rejected(request_id=request_id, code="queue_full", reason=reason, retry_after=1.0)
        now = time.monotonic()
        span = self._tracer.join("llm_request", generate.traceparent, now)
        request = Request(generate, gateway, arrived=now, span=span)
        self.requests.add(request)
        if generate.grammar is not None:
            self._grammars.compile(request)
        log.debug(
            "queued",
            request_id=request_id,
            prompt_tokens=len(generate.prompt_ids),
            max_new_tokens=generate.max_new_tokens,
        )
        return None

    def cancel(self, request_id: str, gateway: Peer) -> None:
        """The client left. An unknown or ended request is answered in the same way."""
        if request := self.requests.get(request_id):
            self.end(request, "abort")
        else:
            self.outputs.unknown(request_id, gateway)

    def retry(self, request: Request, reason: str) -> None:
        """A request that lost its prefill attempt waits for another one, or ends if it had all its attempts.

        It gives its cached prefix back, and looks for one again then.
        """
        self.slots.release(request)
        if request.prefill_failures > self._limits.prefill_retries:
            self.end(request, "error", f"prefill failed {request.prefill_failures} times, at last: {reason}")
        else:
            self._metrics.prefill_retries.inc()
            pause = RETRY_S * 2 ** max(0, request.prefill_failures - 1)
            request.again_at = time.monotonic() + min(pause, LONGEST_RETRY_S)

    def give_back_stranded(self, gateway: Peer) -> None:
        """End requests that nobody can prefill, and of which the client has no token: their gateway knows no prefill
        node, and none that leaves for a successor. It finds another decode node for them, or tells the clients."""
        donors = self.requests.donors()
        for request in self.requests.in_state(RequestState.WAITING):
            is_new = request.gateway == gateway and not request.generated and request.generate.group not in donors
            fits_here = self._local is not None and self._local.fits(request.kv_tokens)
            if is_new and not fits_here and self._remote.nodes.choose(request) is None:
                self.end(request, "abort", "no prefill node is left")

    # --- a turn of the loop ---

    @property
    def has_work(self) -> bool:
        """Whether the next turn should come at once, rather than after a wait for messages."""
        if not self._steps.is_idle or (self._local is not None and self._local.has_work):
            return True
        return not self._stalled and any(request.has_kv for request in self.requests.values())

    def turn(self) -> None:
        """Move every request on by at most one step. Raises DeviceFailed if the device does not work any more, and
        GroupFailed if the group does not."""
        for request, finish_reason, error in self._grammars.settle():
            self.end(request, finish_reason, error)
        self._start_prefills()
        self._advance_local_prefill()
        admitted = self._admit()
        self._steps.launch(self.slots.make_room())
        taken = self._take_tokens()
        self._steps.sample()
        # Between steps: a row must not change while a step is half queued.
        self._coordinator.fill_rows()
        self._stalled = not admitted and not taken and self._steps.is_idle
        self.outputs.flush()

    def _start_prefills(self) -> None:
        """Start waiting requests, in order, until one has to wait for host slots.

        Of a group one is prefilled. The others wait for that, and share its prompt. One that needs log probabilities of
        its prompt is prefilled by itself. None is started while `max_waiting` before it have landed: prompts that are
        cached take no slots, so nothing else would bound how many wait to be admitted.
        """
        queue = self.requests.in_state(RequestState.WAITING, RequestState.LANDED)
        is_shared = any(request.generate.group and not request.has_kv for request in queue)
        donors = self.requests.donors() if is_shared else {}
        landed = 0
        for request in queue:
            if request.has_kv:
                landed += 1
                continue
            if landed >= self._limits.max_waiting:
                return
            shares = not request.generated and not request.lacks_logprobs
            donor = donors.get(request.generate.group) if shares else None
            if donor is not None and not request.has_prompt_of(donor):
                # No gateway of ours says so. Shared slots would be cached as the KV of both.
                donor = None
            if donor is not None and not donor.has_kv:
                continue
            node = self._choose_node(request)
            if node is None and donor is None and request.kv_tokens % BLOCK_TOKENS:
                # Nobody can prefill this one now, but perhaps a shorter prompt. It cannot be cached whole.
                continue
            if not self.slots.start_prefill(request, node, donor):
                return
            landed += request.has_kv
            if request.generate.group and request.state is not RequestState.WAITING:
                donors.setdefault(request.generate.group, request)

    def _choose_node(self, request: Request) -> Peer | LocalPrefill | None:
        """Who would prefill a request now, or None."""
        node = self._remote.nodes.choose(request)
        if node is None:
            return self._local if self._local is not None and self._local.fits(request.kv_tokens) else None
        return None if node.boot_id in request.failed_nodes and time.monotonic() < request.again_at else node

    def _advance_local_prefill(self) -> None:
        if self._local is None or not self._local.has_work:
            return
        failed = self._local.step()
        landed, not_copied = self._local.staged()
        for request in landed:
            self.slots.landed(request, 0)
            log.debug("staged", request_id=request.request_id, tokens=request.kv_tokens)
        for request, reason in (*failed, *not_copied):
            self.end(request, "error", reason)

    def _admit(self) -> bool:
        """Start to run requests whose KV is in host memory, in order; none overtakes but those that wait for a
        grammar. Whether any was admitted."""
        admitted = False
        for request in self.requests.in_state(RequestState.LANDED, RequestState.RETRACTED):
            if request.waits_for_grammar:
                continue
            if self._coordinator.num_running >= self._limits.max_running or not self.slots.admit(request):
                break
            log.debug("admitted", request_id=request.request_id, kv_tokens=request.kv_tokens, was=request.state.value)
            request.move(RequestState.RUNNING)
            admitted, generate = True, request.generate
            try:
                self._runner.admit(request.request_id, generate.prompt_ids, request.generated, generate.sampling)
            except Exception as error:
                log.exception("a request cannot be admitted", request_id=request.request_id)
                self._runner.check_device()
                self.end(request, "error", f"it cannot be admitted: {error}")
        return admitted

    def _take_tokens(self) -> bool:
        """Stream the tokens of the step before, of requests that have not ended meanwhile. Whether there were any."""
        taken = self._steps.take()
        for request, computed in taken:
            if request.state is not RequestState.FINISHED:
                self._take(request, computed)
        return bool(taken)

    def _take(self, request: Request, computed: Computed) -> None:
        """Stream the tokens that a step gave a request, up to the one that ends it."""
        had = len(request.generated)
        try:
            reason = request.extend(computed.token_ids)
        except GrammarViolation as violation:
            self.end(request, "error", f"decode step failed: {violation}")
            return
        if taken := len(request.generated) - had:
            self.outputs.tokens(request, computed.token_ids[:taken], reason, computed.reported[:taken])
        if reason is not None:
            self._close(request, reason)
        elif computed.failure is NoToken.NOTHING_ALLOWED:
            self.end(request, "invalid", str(computed.failure))
        elif computed.failure is not None:
            self.end(request, "error", f"decode step failed: {computed.failure}")

    def _step_failed(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            if request := self.requests.get(request_id):
                if isinstance(error, GrammarViolation):
                    # No token fits: the client's mistake.
                    self.end(request, "invalid", str(error))
                else:
                    self.end(request, "error", f"decode step failed: {error}")

    # --- endings ---

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request before its time and tell its gateway."""
        self.outputs.end(request, reason, error)
        self._close(request, reason, error)

    def hand_over(self, streaming: bool = False) -> None:
        """Take nothing new, and abort requests that have streamed nothing: their gateways try another node at once.

        streaming: abort those that have streamed something, too.
        """
        self._draining = True
        for request in list(self.requests.values()):
            if streaming or len(request.generated) == request.resumed_at:
                self.end(request, "abort", "the decode node is stopping")
        self.outputs.flush()

    def end_streams(self, error: str) -> None:
        """Tell every gateway that this node is lost. Nothing is released: this process ends."""
        for request in self.requests.values():
            self.outputs.end(request, "lost", error)
            spans.end(request, "lost", error)
        self.outputs.flush()

    def _close(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        # What a failed step has left may be wrong.
        self.slots.release(request, keep=reason != "error")
        request.move(RequestState.FINISHED)
        spans.end(request, reason, error)
        self._grammars.forget(request)
        del self.requests[request.request_id]
        self._ended[request.request_id] = None
        log.info(
            "finished",
            request_id=request.request_id,
            reason=reason,
            prompt_tokens=len(request.generate.prompt_ids),
            cached_tokens=request.cached_tokens,
            tokens=len(request.generated),
            prefill=request.prefilled_by,
            seconds=round(time.monotonic() - request.arrived, 4),
            error=error,
        )

    # --- state ---

    def take_stepped(self) -> list[Request]:
        """Requests, retracted ones included, that were in a step since the last call and have not ended."""
        stepped = self._steps.take_stepped()
        return [request for request in self.requests.values() if request.request_id in stepped]

    @property
    def outstanding_tokens(self) -> int:
        """KV tokens that this node's requests hold or may come to hold."""
        return sum(request.most_kv_tokens for request in list(self.requests.values()))

    @property
    def holds_something(self) -> bool:
        """Whether there are requests, or slots that something may still write to."""
        copies = len(self._coordinator.staging) or not self._coordinator.residents.filler.is_idle
        idle = self._steps.is_idle and self._remote.is_idle and not copies
        return bool(self.requests) or not idle

    def check_idle(self) -> None:
        """When nothing is held, every pool must be as full as at start, but for the prefix cache. Raises RuntimeError
        if not."""
        if self.holds_something:
            return
        if not self._coordinator.is_idle() or (self._local is not None and not self._local.is_idle):
            raise RuntimeError("slots are in use although there is no request: they leaked")
