"""Runs requests on the decode nodes.

Choices of one prompt are requests of their own, which a node is asked for in one message. If the node refuses a
request, dies or falls silent, another node goes on after the tokens that have arrived (`gateway.generation`). However a
request leaves a node, a node that may still work on it is told to stop.

The client is told what kind of failure it was, and the request's id. The nodes' reasons are for the log.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial

import structlog

from control.messages import Accepted, Cancel, Ended, Generate, Output, Outputs, Peer, Rejected, Resend
from control.plane import ControlPlane
from gateway.attempt import Attempt, Delta, DeltaSink, PendingGenerate, PendingGroup
from gateway.errors import ApiError, context_length_exceeded, timed_out, unavailable
from gateway.generation import Generation, GenerationLimits, GenerationPhase, NodeFailed, TokenizedRequest
from gateway.held_answers import HeldBytes
from gateway.registry import SILENT_AFTER_S, NodeRegistry

log = structlog.get_logger(__name__)

SWEEP_S = 0.25
_TICK_S = 0.001
CANCEL_FOR_S = 30.0
_GATHER_S = 0.1
"""How long a choice that a node has failed waits for others that are to go elsewhere, too."""
RESEND_FOR_S = 10.0
"""A request fails if tokens are missing for so long."""

_Key = tuple[str, str, str]


class DecodeClient:
    """Runs requests on the decode nodes. Not thread safe: the gateway's event loop owns it."""

    def __init__(self, control: ControlPlane, registry: NodeRegistry, limits: GenerationLimits) -> None:
        self._control = control
        self._limits = limits
        self._registry = registry
        self.attempts: dict[str, Attempt] = {}
        """Requests that are at a node now, by the id of the try."""
        self.generations: dict[Generation, None] = {}
        """All requests that have begun and not ended, the oldest first."""
        self._groups: dict[str, dict[str, Attempt]] = {}
        """The same attempts by group: choices of one prompt."""
        self._pending: dict[str, PendingGroup] = {}
        """By group, choices that have begun and are about to be asked for."""
        self._cancelling: dict[_Key, tuple[Peer, float]] = {}
        """By key of each repeated Cancel: the node that it is sent to, and until when."""
        self._closed = False

    async def stream(
        self, request: TokenizedRequest, read: Callable[[Output], Delta], held: HeldBytes, sink: DeltaSink
    ) -> AsyncGenerator[Sequence[Delta], None]:
        """What `read` makes of outputs, less what the sink takes. Raises ApiError. Closing it cancels the request."""
        generation = Generation(request, self._limits)
        begin = partial(Attempt, generation, read=read, held=held, sink=sink)
        self.generations[generation] = None
        try:
            while True:
                attempt = await self._place(generation, begin)
                try:
                    while True:
                        arrived = await attempt.next()
                        yield arrived
                        if arrived[-1].finish_reason is not None:
                            return
                except NodeFailed as failure:
                    attempt.warn("decode node failed a request", reason=str(failure), tokens=attempt.received)
                    generation.failed(attempt.node, failure)
                finally:
                    self._end(attempt)
        finally:
            del self.generations[generation]
            generation.move(GenerationPhase.ENDED)

    def deliver(self, sender: Peer, message: Accepted | Rejected | Outputs) -> None:
        match message:
            case Accepted():
                if attempt := self._attempt(message.request_id, sender):
                    self._answered(attempt)
            case Rejected():
                self._stop_cancelling(message.request_id, sender)
                if attempt := self._attempt(message.request_id, sender):
                    self._answered(attempt)
                    attempt.over = True
                    attempt.fail(_rejection_reason(message, attempt))
            case Outputs():
                now = time.monotonic()
                for output in message.rows():
                    self._deliver_output(sender, output, now)

    async def sweep(self) -> None:
        """Watch deadlines, silent nodes, unanswered Cancels. Raises ControlPlaneFailed if the control thread ends."""
        swept, pause = time.monotonic(), SWEEP_S
        while True:
            await asyncio.sleep(pause)
            self._control.check()
            now = time.monotonic()
            # If this gateway was stopped itself, that it heard nobody says nothing about the nodes.
            stopped = now - swept > 1.0 + SWEEP_S
            swept, pause = now, SWEEP_S
            for attempt in self.attempts.values():
                silent = now - max(attempt.started, self._control.last_heard(attempt.node.boot_id) or 0.0)
                if silent <= SILENT_AFTER_S:
                    # A stream waits for it: the next look is not later than the node may be found silent.
                    pause = min(pause, SILENT_AFTER_S - silent + _TICK_S)
                if attempt.generation.is_overdue(now):
                    attempt.fail(timed_out())
                elif self._registry.replaced(attempt.node):
                    attempt.died("the decode node was restarted")
                elif not stopped and silent > SILENT_AFTER_S:
                    attempt.died(f"the decode node fell silent for {SILENT_AFTER_S:g} s")
                elif attempt.gap is not None and now - attempt.gap.since > RESEND_FOR_S:
                    lost = f"tokens {attempt.gap.start} to {attempt.gap.stop - 1} were lost on the way"
                    attempt.fail(attempt.request.failed(lost))
            for key, (node, until) in list(self._cancelling.items()):
                if now > until:
                    log.warning("gave up cancelling a request", request_id=key[1], node=node.address)
                if now > until or self._registry.replaced(node):
                    del self._cancelling[key]
                    self._control.answered(key)

    async def close(self, timeout: float) -> None:
        """End every request with an error, and wait until the decode nodes have confirmed that they stopped."""
        self._closed = True
        for attempt in self.attempts.values():
            attempt.fail(unavailable("the gateway is shutting down"))
        until = time.monotonic() + timeout
        while (self.attempts or self._cancelling) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    async def _place(self, generation: Generation, begin: Callable[[Generate, Peer, float], Attempt]) -> Attempt:
        """Begin a try. One with tokens waits while all nodes are full, or no prefill node is ready.

        Raises ApiError if no node can take it.
        """
        request = generation.request
        while True:
            try:
                return self._begin(generation, begin)
            except ApiError as error:
                if not generation.token_ids or self._closed:
                    raise
                if error.code != "queue_full" and not self._registry.lacks_prefill(time.monotonic()):
                    if request.streams:
                        raise request.failed("the request was lost at its decode node") from error
                    raise
                wait = error.retry_after or 1.0
            await asyncio.sleep(wait)
            if generation.is_overdue():
                raise timed_out()
            generation.failures.clear()

    def _choose(self, generation: Generation, now: float, cached: Mapping[str, int]) -> Peer:
        """The best node that did not fail a request. cached: by boot id. Raises ApiError if there is none."""
        request, failures = generation.request, generation.failures
        # A node that generates other choices of the same prompt comes first.
        others = self._groups.get(request.group, {}).values()
        nodes = (other.node for other in others if other.node.boot_id not in failures and other.failure is None)
        beside = next(nodes, None)
        refused = [boot_id for boot_id, failure in failures.items() if not failure.died]
        pick = partial(self._registry.pick_decode, request.tokens, now=now, cached=cached, avoid=generation.dead)
        # One that was lost and lives is better than none.
        node = beside or pick(failures) or pick(refused)
        if self._closed:
            raise unavailable("the gateway is shutting down")
        if node is None:
            full = [failure.retry_after for failure in failures.values() if failure.retry_after is not None]
            if full:
                text, retry_after = "all decode nodes are full; try again later", max(1, math.ceil(min(full)))
                raise ApiError(429, text, code="queue_full", retry_after=retry_after)
            raise unavailable(self._registry.unready_reason(now) or "no decode node could take the request; try again")
        generation.span.note(
            lambda: {
                "node": node.address,
                "why": "choices of its prompt are there" if beside else "cached tokens, less load",
                "candidates": self._registry.candidates("decode", now, cached),
            }
        )
        return node

    def _begin(self, generation: Generation, begin: Callable[[Generate, Peer, float], Attempt]) -> Attempt:
        """Begin an attempt. Choices that begin together are asked for together. Raises ApiError if there is no node."""
        now, request = time.monotonic(), generation.request
        group = request.group
        pending = self._pending.get(group)
        if pending is None:
            pending = self._pending[group] = PendingGroup(self._registry.cached(request.block_hashes))
            # Nodes refuse choices one by one. They should go to the next node together, too.
            wait = _GATHER_S if generation.failures and request.generate.group else 0.0
            asyncio.get_running_loop().call_later(wait, self._ask, group)
        node = self._choose(generation, now, pending.cached)
        attempt = begin(generation.placed(self._registry.rank_group(node)), node, now)
        request_id = attempt.generate.request_id
        request.outcome.nodes.append(node.address)
        self.attempts[request_id] = attempt
        self._groups.setdefault(group, {})[request_id] = attempt
        attempt.pending = pending.by_node.setdefault(node.boot_id, PendingGenerate(node))
        attempt.pending.unanswered[request_id] = attempt.generate
        self._registry.assign(node, request.tokens)
        return attempt

    def _ask(self, group: str) -> None:
        """Send nodes the requests that have begun and not ended meanwhile."""
        group_pending, now = self._pending.pop(group), time.monotonic()
        for pending in group_pending.by_node.values():
            if not pending.unanswered:
                continue
            message = pending.message()
            generated = max(len(one.generated) for one in pending.unanswered.values())
            prompt_tokens = len(message.prompt_ids) + generated
            for_prefill = self._registry.for_prefill(now, prompt_tokens, group_pending.cached)
            pending.key = _key("generate", message.request_id, pending.node)
            self._control.repeat(pending.key, pending.node, message.model_copy(update=for_prefill))
            for request_id in pending.unanswered:
                self.attempts[request_id].generation.span.note(
                    lambda: {"candidates": self._registry.candidates("prefill", now, group_pending.cached)}
                )
            if nodes := for_prefill["prefill_nodes"]:
                self._registry.assign(nodes[0], prompt_tokens - group_pending.cached.get(nodes[0].boot_id, 0))

    def _end(self, attempt: Attempt) -> None:
        """The one way in which an attempt ends."""
        request_id, group = attempt.generate.request_id, attempt.request.group
        del self.attempts[request_id], self._groups[group][request_id]
        if not self._groups[group]:
            del self._groups[group]
        self._registry.count_served(attempt.node, attempt.served)
        was_asked = attempt.pending is None or attempt.pending.key is not None
        self._answered(attempt)
        if attempt.gap is not None:
            self._control.answered(_key("resend", request_id, attempt.node))
        if was_asked and not attempt.over:
            self._cancel(request_id, attempt.node)

    def _cancel(self, request_id: str, node: Peer) -> None:
        key = _key("cancel", request_id, node)
        if key not in self._cancelling:
            self._cancelling[key] = (node, time.monotonic() + CANCEL_FOR_S)
            self._control.repeat(key, node, Cancel(request_id=request_id))

    def _stop_cancelling(self, request_id: str, node: Peer) -> None:
        key = _key("cancel", request_id, node)
        if self._cancelling.pop(key, None) is not None:
            self._control.answered(key)

    def _deliver_output(self, sender: Peer, output: Output, now: float) -> None:
        attempt = self._attempt(output.request_id, sender)
        if attempt is not None:
            if attempt.pending is not None:
                self._answered(attempt)
            gap = attempt.gap
            attempt.deliver(output, now)
            if attempt.gap is not gap:
                self._ask_again(attempt)
        if output.finish_reason is None:
            if attempt is None:
                self._cancel(output.request_id, sender)
        elif attempt is None or attempt.over:
            self._control.send(sender, Ended(request_id=output.request_id))
            self._stop_cancelling(output.request_id, sender)

    def _answered(self, attempt: Attempt) -> None:
        """The node need not be asked for it again."""
        pending, attempt.pending = attempt.pending, None
        if pending is not None:
            pending.unanswered.pop(attempt.generate.request_id, None)
            if not pending.unanswered and pending.key is not None:
                self._control.answered(pending.key)

    def _ask_again(self, attempt: Attempt) -> None:
        """Ask for the tokens of a gap that is new, or no longer for those of one that is closed."""
        request_id, node, gap = attempt.generate.request_id, attempt.node, attempt.gap
        key = _key("resend", request_id, node)
        if gap is None:
            self._control.answered(key)
        else:
            attempt.warn("tokens are missing and asked for again", missing_from=gap.start)
            self._control.repeat(key, node, Resend(request_id=request_id, start=gap.start))

    def _attempt(self, request_id: str, sender: Peer) -> Attempt | None:
        attempt = self.attempts.get(request_id)
        return attempt if attempt is not None and attempt.node.boot_id == sender.boot_id else None


def _rejection_reason(rejected: Rejected, attempt: Attempt) -> Exception:
    if rejected.code != "too_long":
        return NodeFailed(rejected.reason, rejected.retry_after if rejected.code == "queue_full" else None)
    attempt.warn("decode node cannot hold a request", reason=rejected.reason)
    return context_length_exceeded(
        "more than a decode node holds now",
        f"the request is too long for its decode node (request {rejected.request_id}). Shorten the prompt.",
        f"prompt is too long: it has more tokens than a decode node holds now (request {rejected.request_id})",
    )


def _key(kind: str, request_id: str, node: Peer) -> _Key:
    """The key of a message that is repeated until it is answered."""
    return (kind, request_id, node.boot_id)
