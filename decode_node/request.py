"""A request at the decode node, which owns it, and the states that it passes through."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from base.tracing import NO_SPAN, TraceSpan
from control.messages import AttemptId, FinishReason, Generate, Peer
from control.prompt_logprobs import PromptLogprobTable, too_many
from engine.adjustments import BannedTokens, adjusts
from engine.grammar.state import GrammarState
from engine.sampling import RandomStream
from hisparse.swap_in import SwapInCounters
from kvcache.extents import HostSlots


class RequestState(Enum):
    """Where a request is, and with that who holds its host slots."""

    WAITING = "waiting"
    """It holds nothing and waits to be prefilled."""
    PREFILLING = "prefilling"
    """A prefill node may be writing to its slots: the reservation table holds them. The request holds those of the
    positions before them, which were cached."""
    LOCAL_PREFILL = "local_prefill"
    """This node computes its prompt; the request holds its slots."""
    STAGING = "staging"
    """Its prompt is being copied from device pages to its slots: the coordinator holds them."""
    LANDED = "landed"
    """Its KV is complete in host memory; the request holds its slots and waits for device slots."""
    RUNNING = "running"
    """It decodes: the coordinator holds its slots."""
    RETRACTED = "retracted"
    """It lost its device slots; its KV is complete in host memory and the request holds its slots."""
    FINISHED = "finished"
    """It holds nothing."""


_SPANS = {
    RequestState.WAITING: "queue",
    RequestState.PREFILLING: "prefill",
    RequestState.LOCAL_PREFILL: "local prefill",
    RequestState.STAGING: "staging",
    RequestState.LANDED: "admission",
    RequestState.RUNNING: "decode",
    RequestState.RETRACTED: "retracted",
}
_GIVEN_UP = {RequestState.WAITING, RequestState.FINISHED}
_NEXT = {
    RequestState.WAITING: {
        RequestState.PREFILLING,
        RequestState.LOCAL_PREFILL,
        RequestState.LANDED,
        RequestState.FINISHED,
    },
    RequestState.PREFILLING: {RequestState.LANDED, *_GIVEN_UP},
    RequestState.LOCAL_PREFILL: {RequestState.STAGING, *_GIVEN_UP},
    RequestState.STAGING: {RequestState.LANDED, *_GIVEN_UP},
    RequestState.LANDED: {RequestState.RUNNING, *_GIVEN_UP},
    RequestState.RUNNING: {RequestState.RETRACTED, *_GIVEN_UP},
    RequestState.RETRACTED: {RequestState.RUNNING, *_GIVEN_UP},
    RequestState.FINISHED: set(),
}


@dataclass(eq=False)
class Request:
    """A request and its tokens. The KV of every token but the newest is stored.

    generated: ids of its tokens so far, the first `resumed_at` of which another node has streamed. launched: the fewest
    tokens that it has when the steps that were launched are read. drafts: of the tokens after the generated ones, which
    its next step verifies.
    """

    generate: Generate
    gateway: Peer
    arrived: float = field(default_factory=time.monotonic)
    state: RequestState = RequestState.WAITING
    spent: defaultdict[RequestState, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in each state that it has left."""
    moved_at: float = field(default_factory=time.monotonic)
    epoch: int = 0
    prefill_failures: int = 0
    """Attempts that have failed since it landed last. One that it gave up itself, or that a leaving node gave back, has
    not."""
    failed_nodes: set[str] = field(default_factory=set)
    """Boot ids of the nodes of these attempts."""
    again_at: float = 0.0
    """When a node that has failed it may be asked again (time.monotonic)."""
    host_slots: HostSlots | None = None
    generated: list[int] = field(init=False)
    launched: int = field(init=False)
    drafts: Sequence[int] = ()
    last_token_at: float = 0.0
    grammar: GrammarState | None = None
    """Where it is in its grammar, once that is compiled."""
    cached_tokens: int | None = None
    """Tokens of its prompt that were not computed for it; None before its KV has landed for the first time."""
    prefilled_by: str | None = None
    """Address of the prefill node that sent its KV last."""
    may_be_shared: bool = True
    """Whether its KV may be cached. Not if something may still be written to its slots, be it the same."""
    prompt_logprobs: PromptLogprobTable | None = None
    """Those of its prompt, if they are asked for, once the prompt has landed for the first time."""
    span: TraceSpan = NO_SPAN
    """From its arrival to its end."""
    stage: TraceSpan = field(init=False)
    """The span of the state that it is in."""
    retractions: int = 0
    """How often it lost its slots."""
    swapped: SwapInCounters | None = None
    """The node's counters when it was admitted, if it is traced."""
    drafted: int = 0
    accepted: int = 0
    """Drafts that were verified, and those that became tokens."""

    def __post_init__(self) -> None:
        self.generated = list(self.generate.generated)
        self.launched = len(self.generated)
        self.stage = self.span.child(_SPANS[self.state], self.moved_at)

    @property
    def resumed_at(self) -> int:
        """Index of the first token that this node generates."""
        return len(self.generate.generated)

    @cached_property
    def random(self) -> RandomStream:
        return RandomStream(self.generate.sampling.seed)

    @property
    def waits_for_grammar(self) -> bool:
        """Whether its grammar is not compiled yet. No token can be drawn for it before."""
        return self.generate.grammar is not None and self.grammar is None

    @cached_property
    def adjusts(self) -> bool:
        """Whether its logits are changed before its tokens are drawn."""
        return adjusts(self.generate.sampling)

    @cached_property
    def banned_tokens(self) -> BannedTokens:
        """Tokens that may not come next, by what it has generated."""
        return BannedTokens(self.generate.sampling, self.generate.stop_token_ids)

    def logprobs_to_compute(self) -> PromptLogprobTable | None:
        """Where the log probabilities of the next prefill go, which computes the whole prompt for them, or None.

        A prefill after the first that has landed gives none again.
        """
        asked = self.generate.prompt_logprobs if self.lacks_logprobs else None
        return None if asked is None else PromptLogprobTable(len(self.generate.prompt_ids), asked)

    @property
    def lacks_logprobs(self) -> bool:
        """Whether its next prefill has to compute log probabilities of its prompt. They come before the first token, so
        another node has sent those of a request that goes on here."""
        asked = self.generate.prompt_logprobs is not None and len(self.generate.prompt_ids) > 1
        return asked and self.prompt_logprobs is None and not self.resumed_at

    def has_prompt_of(self, other: "Request") -> bool:
        """Whether their prompts are the same, and may be shared. Those of one message are one object."""
        mine, theirs = self.generate, other.generate
        return mine.cache_salt == theirs.cache_salt and (
            mine.packed_prompt is theirs.packed_prompt or mine.packed_prompt == theirs.packed_prompt
        )

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and generated ids. The KV of all but the last is prefilled; a decode step computes the last."""
        return self.generate.prompt_ids + tuple(self.generated)

    @property
    def kv_token_ids(self) -> npt.NDArray[np.int32]:
        """The tokens whose KV is stored once it has landed: int32 [kv_tokens]."""
        return np.concatenate([self.generate.prompt, np.array(self.generated, dtype=np.int32)])[:-1]

    @property
    def shared_token_ids(self) -> npt.NDArray[np.int32]:
        """The tokens whose KV may be cached once it has landed: int32 [n].

        Requests of a group share slots after the last whole block of their prompt, too. A slot can be in one cached
        block only, so of a group nothing but the prompt is cached.
        """
        return self.generate.prompt[:-1] if self.generate.group else self.kv_token_ids

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is stored once it has landed: all but the newest, which the next step computes."""
        return len(self.generate.prompt_ids) + len(self.generated) - 1

    @property
    def most_kv_tokens(self) -> int:
        """Host slots that it may come to need."""
        return len(self.generate.prompt_ids) + self.generate.max_new_tokens - 1

    @property
    def wants_step(self) -> bool:
        """Whether another step should be launched for it, unless a token that is not read yet ends it."""
        return self.launched < self.generate.max_new_tokens

    @property
    def has_kv(self) -> bool:
        """Whether its KV is complete in host memory."""
        return self.state in (RequestState.LANDED, RequestState.RUNNING, RequestState.RETRACTED)

    def attempt(self, decode: str) -> AttemptId:
        """Its latest prefill attempt. decode: the boot id of this node."""
        return AttemptId(decode, self.request_id, self.epoch)

    def move(self, to: RequestState) -> None:
        """The only way in which the state changes. Raises RuntimeError if `to` cannot follow."""
        if to not in _NEXT[self.state]:
            raise RuntimeError(f"request {self.request_id} is {self.state.value} and cannot become {to.value}")
        now = time.monotonic()
        self.spent[self.state] += now - self.moved_at
        self.stage.end(now)
        self.state, self.moved_at = to, now
        if to is not RequestState.FINISHED:
            self.stage = self.span.child(_SPANS[to], now)

    def extend(self, token_ids: Iterable[int]) -> FinishReason | None:
        """Add tokens, up to the first that ends the request. Returns why it ends it, or None.

        Raises GrammarViolation for a token that the grammar does not allow.
        """
        grammar, stop_token_ids, most = self.grammar, self.generate.stop_token_ids, self.generate.max_new_tokens
        for token_id in token_ids:
            self.generated.append(token_id)
            if grammar is not None:
                grammar.advance(token_id)
            if token_id in stop_token_ids or (grammar is not None and grammar.done):
                return "stop"
            if len(self.generated) >= most:
                return "length"
        return None


class RequestTable(dict[str, Request]):
    """The requests of a decode node by id, in their one order: by priority, lower first, and then by arrival.

    The first goes first everywhere; the last gives way.
    """

    def add(self, request: Request) -> None:
        priority = request.generate.priority
        later = [*takewhile(lambda other: other.generate.priority > priority, reversed(self.values()))]
        self[request.request_id] = request
        for other in reversed(later):
            self[other.request_id] = self.pop(other.request_id)

    def donors(self) -> dict[str, Request]:
        """By group, a request whose prompt others of the group can share, now or when it has landed."""
        donors: dict[str, Request] = {}
        for request in self.values():
            group = request.generate.group
            if group and request.state is not RequestState.WAITING and (group not in donors or request.has_kv):
                donors[group] = request
        return donors

    def has_waiting(self, count: int) -> bool:
        """Whether at least so many are in state WAITING. Takes no time if there are fewer in all."""
        return len(self) >= count and len(self.in_state(RequestState.WAITING)) >= count

    def in_state(self, *states: RequestState) -> list[Request]:
        return [request for request in self.values() if request.state in states]


@dataclass(frozen=True)
class Limits:
    """Which requests a node accepts.

    host_slots: of the whole host pool. max_waiting: requests in state WAITING; more are rejected. As many
    may wait in state LANDED.
    """

    context_length: int
    vocab_size: int
    host_slots: int
    max_running: int
    max_waiting: int
    prefill_retries: int

    def rejection_reason(self, generate: Generate) -> str | None:
        """Why the request could never run here, naming both values, or None."""
        prompt, new = len(generate.prompt_ids), generate.max_new_tokens
        if prompt + new > self.context_length:
            return f"{prompt} prompt tokens and max_tokens {new} exceed the context of {self.context_length} tokens"
        if prompt + new - 1 > self.host_slots:
            return f"{prompt + new - 1} tokens of KV exceed the host pool of {self.host_slots}"
        # Tables on the device have no room for others.
        largest = max(int(generate.prompt.max()), max(generate.generated, default=0), generate.largest_named_id)
        if largest >= self.vocab_size:
            return f"token id {largest} is outside the vocabulary of {self.vocab_size}"
        return None if generate.prompt_logprobs is None else too_many(prompt, generate.prompt_logprobs)
