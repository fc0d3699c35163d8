"""One request's life between the gateway and the decode nodes.

A request is offered to one decode node at a time. While its client has got no token of it, a node that refuses it, dies
or falls silent is passed over for the next, which begins anew; after that its failure is the request's failure.
Whatever way a request ends here, a node that may still be working on it is told to stop.

Messages may be lost. Tokens come with their index, so one that is missing shows when a later one comes. Then all from
the missing one on are asked for again, until they have come or RESEND_FOR_S is over; what comes meanwhile of later ones
is dropped. A node is told that a request has ended only when nothing of it is missing.

What nodes give as reasons is for the log: clients learn what kind of failure it was, and the request's id.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import structlog

from control.messages import (
    Accepted,
    Cancel,
    Ended,
    FinishReason,
    Generate,
    Output,
    Outputs,
    Peer,
    Rejected,
    Resend,
    Sampling,
    Token,
)
from control.plane import ControlPlane
from gateway.errors import ApiError, context_length_exceeded, timed_out, unavailable
from gateway.registry import SILENT_AFTER_S, NodeRegistry

log = structlog.get_logger(__name__)

SWEEP_S = 0.25
CANCEL_FOR_S = 30.0
RESEND_FOR_S = 10.0
"""Without a missing token for so long, a request fails."""


@dataclass(frozen=True)
class Job:
    """What is to be generated. `arrived` and `deadline` are in time.monotonic."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    streams: bool
    """Whether its client gets tokens as they come, rather than all of them at the end."""
    arrived: float
    deadline: float

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True)
class Step:
    """New tokens in order, none twice. The last step has a finish reason.

    `begins`: the answer begins with this step; what came before it was of a node that failed, and counts no more.
    """

    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None
    begins: bool


class _NodeFailed(Exception):
    """This decode node does not finish the request; another one may."""


class _Refused(_NodeFailed):
    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.reason)
        self.rejected = rejected


@dataclass
class _Gap:
    """Tokens from index `start` on were missing when one of index `stop` came, and was dropped.

    known: before which index there are tokens, as far as was heard. since: when the gap was noticed, or when tokens
    last came that close some of it.
    """

    start: int
    stop: int
    known: int
    since: float


@dataclass
class _Attempt:
    """A request at one decode node."""

    job: Job
    node: Peer
    started: float
    events: "asyncio.Queue[Step | Exception]" = field(default_factory=asyncio.Queue)
    received: int = 0
    """Tokens that have arrived, none missing before the last."""
    gap: _Gap | None = None
    over: bool = False
    """The node has said that it holds nothing of the request any more, and all that it said has arrived."""
    failed: bool = False

    def deliver(self, output: Output, now: float) -> None:
        """Take new tokens. Once it is over, nothing: the last ones are repeated until the node hears that they came."""
        if self.over:
            return
        if failure := self._failure(output):
            self.over, self.gap = True, None
            self.events.put_nowait(failure)
        elif output.start > self.received:
            known = output.start + len(output.tokens)
            if self.gap is None or self.gap.start != self.received:
                # The latter: of what was sent again, something was lost, too.
                known = max(known, 0 if self.gap is None else self.gap.known)
                self.gap = _Gap(self.received, output.start, known, now)
            self.gap.known = max(self.gap.known, known)
        else:
            self._take(output, now)

    def fail(self, reason: Exception) -> None:
        """End the attempt after what has already arrived. The first reason counts."""
        if not self.failed:
            self.failed = True
            self.events.put_nowait(reason)

    async def next(self) -> Step:
        """The next new tokens. Raises _NodeFailed or ApiError."""
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def _take(self, output: Output, now: float) -> None:
        """What continues what has arrived, or repeats it."""
        tokens = output.tokens[self.received - output.start :]
        begins = self.received == 0
        self.received += len(tokens)
        if self.gap is not None and tokens:
            self.gap.since = now
            if self.received >= self.gap.known:
                self.gap = None
        self.over = output.finish_reason is not None
        if tokens or self.over:
            self.events.put_nowait(Step(tokens, output.finish_reason, begins))

    def _failure(self, output: Output) -> Exception | None:
        """What the node says ended the request before its time, or None."""
        match output.finish_reason:
            case "error":
                log.warning(
                    "decode node ended a request with an error",
                    request_id=output.request_id,
                    node=self.node.address,
                    reason=output.error,
                )
                return _failed("the request failed at its decode node", self.job)
            case "abort":
                return _NodeFailed(f"aborted by its decode node: {output.error or 'no reason given'}")
        return None


class DecodeClient:
    """Runs requests on the decode nodes. Not thread safe: the gateway's event loop owns it."""

    def __init__(self, control: ControlPlane, registry: NodeRegistry) -> None:
        self._control = control
        self._registry = registry
        self._attempts: dict[str, _Attempt] = {}
        self._cancelling: dict[tuple[str, str, str], tuple[Peer, float]] = {}
        """Repeated Cancels by their key: to whom, and when to give each up."""
        self._closed = False

    @property
    def waiting(self) -> int:
        """Requests of which no token has arrived."""
        return sum(not attempt.received for attempt in self._attempts.values())

    @property
    def running(self) -> int:
        return len(self._attempts) - self.waiting

    @property
    def in_flight(self) -> int:
        return len(self._attempts)

    async def stream(self, job: Job) -> AsyncGenerator[Step, None]:
        """The steps of a request. Raises ApiError. Closing the iterator early cancels the request at its node."""
        refusals: dict[str, Rejected | None] = {}
        while True:
            attempt = self._begin(job, refusals)
            try:
                while True:
                    step = await attempt.next()
                    yield step
                    if step.finish_reason is not None:
                        return
            except _NodeFailed as failure:
                log.warning(
                    "decode node failed a request",
                    request_id=job.request_id,
                    node=attempt.node.address,
                    reason=str(failure),
                    tokens=attempt.received,
                )
                if attempt.received and job.streams:
                    raise _failed("the request was lost at its decode node", job) from failure
                refusals[attempt.node.boot_id] = failure.rejected if isinstance(failure, _Refused) else None
            finally:
                self._end(attempt)

    def deliver(self, sender: Peer, message: Accepted | Rejected | Outputs) -> None:
        """Take a decode node's message."""
        match message:
            case Accepted():
                self._control.answered(_generate_key(message.request_id, sender))
            case Rejected():
                self._control.answered(_generate_key(message.request_id, sender))
                self._stop_cancelling(message.request_id, sender)
                if attempt := self._attempt(message.request_id, sender):
                    attempt.over = True
                    attempt.fail(_refusal(message, attempt))
            case Outputs():
                for output in message.outputs:
                    self._deliver_output(sender, output)

    async def sweep(self) -> None:
        """Watch deadlines, silent nodes and unanswered Cancels for as long as the gateway runs.

        Raises ControlPlaneFailed if no decode node can be heard any more.
        """
        swept = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            self._control.check()
            now = time.monotonic()
            # A gateway that was itself stopped has heard nobody, which says nothing of the nodes.
            stopped = now - swept > 1.0 + SWEEP_S
            swept = now
            for attempt in self._attempts.values():
                if now > attempt.job.deadline:
                    attempt.fail(timed_out())
                elif self._registry.replaced(attempt.node):
                    attempt.fail(_NodeFailed("the decode node was restarted"))
                elif not stopped and self._silent(attempt, now):
                    attempt.fail(_NodeFailed(f"the decode node fell silent for {SILENT_AFTER_S:g} s"))
                elif attempt.gap is not None and now - attempt.gap.since > RESEND_FOR_S:
                    lost = f"tokens {attempt.gap.start} to {attempt.gap.stop - 1} were lost on the way"
                    attempt.fail(_failed(lost, attempt.job))
            for key, (node, until) in list(self._cancelling.items()):
                if now > until:
                    log.warning("gave up cancelling a request", request_id=key[1], node=node.address)
                if now > until or self._registry.replaced(node):
                    del self._cancelling[key]
                    self._control.answered(key)

    async def close(self, timeout: float) -> None:
        """End every request with an error, and wait until the decode nodes have confirmed that they stopped."""
        self._closed = True
        for attempt in self._attempts.values():
            attempt.fail(unavailable("the gateway is shutting down"))
        until = time.monotonic() + timeout
        while (self._attempts or self._cancelling) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def _begin(self, job: Job, refusals: dict[str, Rejected | None]) -> _Attempt:
        """Offer the request to the best node that has not failed it. Raises ApiError if there is none."""
        now = time.monotonic()
        node = self._registry.pick_decode(job.tokens, refusals.keys(), now)
        if self._closed:
            raise unavailable("the gateway is shutting down")
        if node is None:
            raise self._nobody([r for r in refusals.values() if r is not None], now)
        prefill_nodes = self._registry.rank_prefill(now, len(job.prompt_ids))
        attempt = self._attempts[job.request_id] = _Attempt(job, node, started=now)
        generate = Generate(
            request_id=job.request_id,
            prompt_ids=job.prompt_ids,
            max_new_tokens=job.max_new_tokens,
            sampling=job.sampling,
            stop_token_ids=job.stop_token_ids,
            prefill_nodes=tuple(prefill_nodes),
            longest_prompts=self._registry.longest_prompts(now),
        )
        self._control.repeat(_generate_key(job.request_id, node), node, generate)
        self._registry.assign(node, job.tokens)
        if prefill_nodes:
            self._registry.assign(prefill_nodes[0], len(job.prompt_ids))
        return attempt

    def _nobody(self, refusals: list[Rejected], now: float) -> ApiError:
        """Why no decode node is left."""
        full = [refusal for refusal in refusals if refusal.code == "queue_full"]
        if full:
            soonest = min(refusal.retry_after for refusal in full)
            return ApiError(
                429,
                "all decode nodes are full; try again later",
                code="queue_full",
                retry_after=max(1, math.ceil(soonest)),
            )
        return unavailable(self._registry.missing(now) or "no decode node could take the request; try again")

    def _end(self, attempt: _Attempt) -> None:
        """The one way in which an attempt ends."""
        request_id = attempt.job.request_id
        del self._attempts[request_id]
        self._control.answered(_generate_key(request_id, attempt.node))
        self._control.answered(_resend_key(request_id, attempt.node))
        if not attempt.over:
            self._cancel(request_id, attempt.node)

    def _cancel(self, request_id: str, node: Peer) -> None:
        key = _cancel_key(request_id, node)
        if key not in self._cancelling:
            self._cancelling[key] = (node, time.monotonic() + CANCEL_FOR_S)
            self._control.repeat(key, node, Cancel(request_id=request_id))

    def _stop_cancelling(self, request_id: str, node: Peer) -> None:
        key = _cancel_key(request_id, node)
        if self._cancelling.pop(key, None) is not None:
            self._control.answered(key)

    def _deliver_output(self, sender: Peer, output: Output) -> None:
        attempt = self._attempt(output.request_id, sender)
        if attempt is not None:
            self._control.answered(_generate_key(output.request_id, sender))
            self._take(attempt, output)
        if output.finish_reason is None:
            if attempt is None:
                # Nobody here waits for it.
                self._cancel(output.request_id, sender)
        elif attempt is None or attempt.over:
            self._control.send(sender, Ended(request_id=output.request_id))
            self._stop_cancelling(output.request_id, sender)

    def _take(self, attempt: _Attempt, output: Output) -> None:
        """Take new tokens, and ask for those that are missing before them."""
        asked_from = None if attempt.gap is None else attempt.gap.start
        attempt.deliver(output, time.monotonic())
        missing_from = None if attempt.gap is None else attempt.gap.start
        if missing_from == asked_from:
            return
        key = _resend_key(attempt.job.request_id, attempt.node)
        if missing_from is None:
            self._control.answered(key)
        else:
            log.warning(
                "tokens are missing and asked for again",
                request_id=attempt.job.request_id,
                node=attempt.node.address,
                missing_from=missing_from,
            )
            resend = Resend(request_id=attempt.job.request_id, start=missing_from)
            self._control.repeat(key, attempt.node, resend)

    def _attempt(self, request_id: str, sender: Peer) -> _Attempt | None:
        attempt = self._attempts.get(request_id)
        return attempt if attempt is not None and attempt.node.boot_id == sender.boot_id else None

    def _silent(self, attempt: _Attempt, now: float) -> bool:
        heard = self._control.last_heard(attempt.node.boot_id)
        return now - max(attempt.started, heard or 0.0) > SILENT_AFTER_S


def _refusal(rejected: Rejected, attempt: _Attempt) -> Exception:
    if rejected.code != "too_long":
        return _Refused(rejected)
    log.warning(
        "decode node cannot hold a request",
        request_id=rejected.request_id,
        node=attempt.node.address,
        reason=rejected.reason,
    )
    return context_length_exceeded(f"the request is too long for its decode node (request {rejected.request_id})")


def _failed(what: str, job: Job) -> ApiError:
    return ApiError(500, f"{what} (request {job.request_id}); try again")


def _generate_key(request_id: str, node: Peer) -> tuple[str, str, str]:
    return ("generate", request_id, node.boot_id)


def _resend_key(request_id: str, node: Peer) -> tuple[str, str, str]:
    return ("resend", request_id, node.boot_id)


def _cancel_key(request_id: str, node: Peer) -> tuple[str, str, str]:
    return ("cancel", request_id, node.boot_id)
