"""A request from its first decode node to its last: the tokens that have arrived, and whether it may go on elsewhere.

A request is at one decode node at a time. Token i depends on the seed, i and the tokens before it alone, so another
node goes on after the tokens that have arrived. Each try has an id of its own on the wire: what an earlier try still
sends belongs to no request, and is cancelled.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from base.block_hashes import BlockHashes
from base.tracing import NO_SPAN, TraceSpan
from control.messages import DraftCounts, Generate, Peer, Token
from gateway.errors import ApiError

MAX_DEATHS = 2
"""A request that was at so many nodes when they died may be the cause: no further node gets it."""


@dataclass(slots=True)
class AnswerOutcome:
    """What has become of one answer, for usage and for the access log.

    reason: why it ended; nobody sets it when the client cancels. ttft: seconds until its first token.
    """

    reason: str = "cancelled"
    tokens: int = 0
    cached_tokens: int = 0
    """Of its prompt, those that were not computed for it, as soon as a node has said so."""
    ttft: float | None = None
    drafts: DraftCounts = (0, 0)
    """Of all tries, if the client asked for them."""
    drafts_before: DraftCounts = (0, 0)
    """Of the tries before this one."""
    migrations: int = 0
    """How often it went on at another decode node, as its own had failed."""
    nodes: list[str] = field(default_factory=list)
    """Addresses of the decode nodes that were asked for it, in order."""

    def note_drafts(self, of_this_try: DraftCounts) -> None:
        """of_this_try: those of its steps so far."""
        (verified, right), (more_verified, more_right) = self.drafts_before, of_this_try
        self.drafts = verified + more_verified, right + more_right


@dataclass(frozen=True)
class TokenizedRequest:
    """What a decode node is to generate. arrived, deadline: in time.monotonic.

    generate: without `further` and the prefill nodes. A thread makes it: the validation of a long prompt takes long.
    """

    generate: Generate
    streams: bool
    """Whether the client gets tokens as they come, rather than all of them at the end."""
    arrived: float
    deadline: float
    block_hashes: BlockHashes | None = field(default=None, compare=False)
    """Of the prompt's blocks, by which the gateway looks for a node that has them; None if it does not."""
    structure_field: str | None = None
    """The field of the body that the grammar was made of."""
    span: TraceSpan = field(default=NO_SPAN, compare=False)
    """Of the client's request."""
    outcome: AnswerOutcome = field(init=False, compare=False, default_factory=AnswerOutcome)

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.generate.prompt_ids

    @property
    def group(self) -> str:
        """The same for all choices of one prompt, which are generated at one node as long as it does not fail them."""
        return self.generate.group or self.request_id

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + self.generate.max_new_tokens

    def failed(self, what: str) -> ApiError:
        return ApiError(500, f"{what} (request {self.request_id}); try again")


class NodeFailed(Exception):
    """This decode node does not finish the request; another may.

    retry_after: seconds until its queue may have room. died: it died or was cut off when it had the request.
    """

    def __init__(self, reason: str, retry_after: float | None = None, died: bool = False) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        self.died = died


@dataclass(frozen=True)
class GenerationLimits:
    """migrations: how often a request may move to another node. token_timeout: seconds without a new token."""

    migrations: int
    token_timeout: float


class GenerationPhase(Enum):
    """Where a request is."""

    PLACING = "placing"
    """At no node: one is chosen, or all of them are full."""
    WAITING = "waiting"
    """At a node that has sent no token of it."""
    STREAMING = "streaming"
    """At a node that has sent tokens of it."""
    ENDED = "ended"
    """Finished, failed, or left by its client."""


_NEXT = {
    GenerationPhase.PLACING: {GenerationPhase.WAITING, GenerationPhase.ENDED},
    GenerationPhase.WAITING: {GenerationPhase.STREAMING, GenerationPhase.PLACING, GenerationPhase.ENDED},
    GenerationPhase.STREAMING: {GenerationPhase.PLACING, GenerationPhase.ENDED},
    GenerationPhase.ENDED: set[GenerationPhase](),
}


@dataclass(eq=False, slots=True)
class Generation:
    """Owns what is known of a request across its tries. Belongs to the gateway's event loop.

    token_ids: of all tokens that have arrived, none missing. failures: by boot id, nodes that the next try avoids; one
    that was cut off and lives gets it if there is no other.
    """

    request: TokenizedRequest
    limits: GenerationLimits
    phase: GenerationPhase = GenerationPhase.PLACING
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    failures: dict[str, NodeFailed] = field(default_factory=dict)
    tries: int = 0
    rank_group: str = ""
    """Of the node that it is at, or was at last; empty: that is a node of its own."""
    dead: set[str] = field(default_factory=set)
    """What has died with the request: rank groups, and boot ids of nodes of their own."""
    progress_at: float = field(init=False)
    """When the last token arrived (time.monotonic), or the request."""
    span: TraceSpan = field(init=False)
    """Of the phase that it is in."""

    def __post_init__(self) -> None:
        self.progress_at = self.request.arrived
        self.span = self.request.span.child("route")

    def move(self, to: GenerationPhase, span: str | None = None) -> None:
        """The only way in which the phase changes. Raises RuntimeError if `to` cannot follow.

        span: the name of the span of the new phase, if it has one.
        """
        if to not in _NEXT[self.phase]:
            raise RuntimeError(f"request {self.request.request_id} is {self.phase.value} and cannot become {to.value}")
        self.phase = to
        self.span.end()
        self.span = NO_SPAN if span is None else self.request.span.child(span)

    def placed(self, rank_group: str = "") -> Generate:
        """Begin a try at a node. Returns what it is asked for."""
        self.move(GenerationPhase.WAITING, "wait")
        self.rank_group = rank_group
        generate, self.tries = self.request.generate, self.tries + 1
        if self.tries == 1:
            return generate
        self.request.outcome.drafts_before = self.request.outcome.drafts
        own: dict[str, object] = {"request_id": f"{generate.request_id}.{self.tries}"}
        if self.token_ids:
            # The log probabilities of the prompt came before the first token.
            own |= {"generated": tuple(self.token_ids), "prompt_logprobs": None}
        return generate.model_copy(update=own)

    def took(self, tokens: Sequence[Token], now: float) -> None:
        """Tokens have arrived that follow those before."""
        if not tokens:
            return
        if self.phase is GenerationPhase.WAITING:
            self.move(GenerationPhase.STREAMING, "stream")
        self.token_ids.extend([token.token_id for token in tokens])
        self.progress_at = now

    def failed(self, node: Peer, failure: NodeFailed) -> None:
        """The try at a node has ended before the request. Raises ApiError if the request may not go to another one."""
        migrates = self.phase is GenerationPhase.STREAMING or failure.died
        self.span.fail(str(failure))
        self.move(GenerationPhase.PLACING, "migrate" if migrates else "route")
        self.span.note(lambda: {"from": node.address, "reason": str(failure), "tokens": len(self.token_ids)})
        if migrates:
            # Nodes that had no room or no prefill node for it then may have some now.
            self.failures.clear()
        self.failures[node.boot_id] = failure
        if failure.died:
            self.dead.add(self.rank_group or node.boot_id)
        self.request.outcome.migrations += migrates
        if len(self.dead) >= MAX_DEATHS:
            lost = f"the request was at {len(self.dead)} decode nodes when they were lost, and goes to no other"
            raise ApiError(500, f"{lost} (request {self.request.request_id})")
        if self.request.outcome.migrations > self.limits.migrations:
            raise self.request.failed("the request was lost at its decode node")

    def is_overdue(self, now: float | None = None) -> bool:
        """Whether it took too long, as a whole or since its last token."""
        now = time.monotonic() if now is None else now
        return now > self.request.deadline or now - self.progress_at > self.limits.token_timeout
