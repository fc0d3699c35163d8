"""One attempt to have a request generated: the decode node that has it, and what arrived from there.

Each message says at which index its tokens begin. Tokens after a gap are dropped, and the decode client asks for all
tokens from the gap on. Log probabilities of the prompt that are missing at the first token are a gap before it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import structlog

from control.messages import FurtherChoice, Generate, Output, Peer, Token
from control.prompt_logprobs import PromptLogprobs, PromptLogprobTable
from gateway.errors import ApiError, wrong
from gateway.generation import Generation, NodeFailed, TokenizedRequest
from gateway.held_answers import HeldBytes

log = structlog.get_logger(__name__)

_DELTA_BYTES = 300
"""What a delta takes as an object."""
_TOKEN_BYTES = 120
"""What a token takes in it, and as much each of its alternatives."""


EndReason: TypeAlias = Literal["stop", "length"]


class Delta(NamedTuple):
    """What new tokens add to an answer. A named tuple: a frozen dataclass takes three times as long to make.

    text: that of a token may come with a later delta. offsets: where in the answer's text each token begins, counted
    with the stop string. first: the answer begins with these tokens. stop: the stop string, or the token of the
    request's `stop_token_ids`, that ended the answer. prompt: with the first tokens, the prompt's log probabilities, if
    asked for.
    """

    text: str
    tokens: tuple[Token, ...]
    offsets: tuple[int, ...]
    finish_reason: EndReason | None
    first: bool = False
    stop: str | int | None = None
    prompt: PromptLogprobTable | None = None


@dataclass(slots=True)
class DeltaSink:
    """Takes deltas directly to a connection, past the tasks and generators in between.

    take: called on the event loop with a delta while the reader of the answer waits, having dealt with all earlier
    ones. Returns false, and does nothing, if the delta has to go to the reader. None: all have to.
    """

    take: Callable[[Delta], bool] | None = None


@dataclass(eq=False, slots=True)
class PendingGenerate:
    """Asks a node for choices of a prompt. unanswered: those that it has not answered. key: of the message, if sent."""

    node: Peer
    unanswered: dict[str, Generate] = field(default_factory=dict)
    key: tuple[str, str, str] | None = None

    def message(self) -> Generate:
        """What the node is told, but for the prefill nodes."""
        # The first of a message is the one that may ask for the log probabilities of the prompt.
        requests = sorted(self.unanswered.values(), key=lambda generate: generate.prompt_logprobs is None)
        further = tuple(
            FurtherChoice(request_id=one.request_id, seed=one.sampling.seed, generated=one.generated)
            for one in requests[1:]
        )
        return requests[0].model_copy(update={"further": further})


@dataclass(eq=False, slots=True)
class PendingGroup:
    """Choices of one prompt that begin together. cached: tokens of it that nodes have, by boot id; looked up once."""

    cached: Mapping[str, int]
    by_node: dict[str, PendingGenerate] = field(default_factory=dict)


@dataclass
class _Gap:
    """Tokens [start, stop) are missing. known: the highest end of any output. since: when it came up or last shrank."""

    start: int
    stop: int
    known: int
    since: float


@dataclass(slots=True)
class Attempt:
    """A request at one decode node. Belongs to the gateway's event loop.

    generate: what the node is asked for, under the id of this try. read: makes a delta of an output as soon as it
    arrives. Each output begins after the tokens that were read, those of earlier tries included. It may find that the
    answer ends with it. held: counts deltas until they are taken.
    """

    generation: Generation
    generate: Generate
    node: Peer
    started: float
    read: Callable[[Output], Delta]
    held: HeldBytes
    sink: DeltaSink
    gap: _Gap | None = None
    """What has to be sent again; another object when that begins elsewhere."""
    pending: PendingGenerate | None = None
    """The message that asks the node for it, until the node has answered."""
    over: bool = False
    """The node holds nothing of the request any more, and everything that it sent has arrived."""
    failure: Exception | None = None
    """Why no more tokens come."""
    prompt: PromptLogprobTable | None = field(init=False)
    """The log probabilities of the prompt that have arrived, if they were asked for."""
    _arrived: list[Delta] = field(init=False, default_factory=list)
    """Not taken yet by `next`."""
    _waiting_bytes: int = field(init=False, default=0)
    """What they take."""
    _ended: bool = field(init=False, default=False)
    """Whether the last delta has been read."""
    _waiting: asyncio.Future[None] | None = field(init=False, default=None)
    """Done when `next` has something to return. An asyncio.Queue costs several times as much."""

    def __post_init__(self) -> None:
        asked, tokens = self.generate.prompt_logprobs, len(self.generate.prompt_ids)
        self.prompt = None if asked is None else PromptLogprobTable(tokens, asked)

    @property
    def request(self) -> TokenizedRequest:
        return self.generation.request

    @property
    def received(self) -> int:
        """Tokens that have arrived in all tries, none missing before the last."""
        return len(self.generation.token_ids)

    @property
    def served(self) -> Counter[str]:
        """Tokens that the node has generated, and of the prompt, of which it says with the first token what it had."""
        earlier = len(self.generate.generated)
        if earlier or not self.received:
            return Counter(generated=self.received - earlier)
        cached = self.request.outcome.cached_tokens
        return Counter(generated=self.received, prompt=len(self.request.prompt_ids), cached=cached)

    def warn(self, event: str, **fields: object) -> None:
        """Log what is wrong with this attempt."""
        log.warning(event, request_id=self.generate.request_id, node=self.node.address, **fields)

    def deliver(self, output: Output, now: float) -> None:
        """Take new tokens. Ignores repeated ones."""
        if self.over:
            return
        if output.finish_reason in ("error", "abort", "lost", "invalid"):
            self.over, self.gap = True, None
            self.fail(self._failure(output))
        elif output.prompt_logprobs is not None:
            self._take_prompt(output.prompt_logprobs)
        elif output.start > self.received or (self.prompt is not None and not self.prompt.complete):
            self._note_gap(output, now)
        else:
            self._take(output, now)

    def fail(self, reason: Exception) -> None:
        """End the attempt after the tokens that have arrived. The first reason counts."""
        if self.failure is None:
            self.failure = reason
            self._wake()

    def died(self, reason: str) -> None:
        """The node has died or was cut off. One that never answered did not die of the request."""
        self.fail(NodeFailed(reason, died=self.pending is None))

    async def next(self) -> Sequence[Delta]:
        """What has arrived and the sink has not taken: at least one delta. Raises `failure`. Only one task may wait."""
        if not self._arrived and self.failure is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if not self._arrived and self.failure is not None:
            raise self.failure
        arrived, self._arrived = self._arrived, []
        self.held.add(-self._waiting_bytes)
        self._waiting_bytes = 0
        return arrived

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _take_prompt(self, piece: PromptLogprobs) -> None:
        reason = (
            "log probabilities that were not asked for" if self.prompt is None else self.prompt.rejection_reason(piece)
        )
        if reason is not None:
            log.warning("wrong log probabilities", request_id=self.request.request_id, reason=reason)
            self.fail(self.request.failed("the request failed at its decode node"))
        elif self.prompt is not None:
            self.prompt.add(piece)

    def _note_gap(self, output: Output, now: float) -> None:
        known = max(output.start + len(output.tokens), self.gap.known if self.gap else 0)
        if self.gap is None or self.gap.start != self.received:
            # In the second case a part of what was sent again was lost, too.
            self.gap = _Gap(self.received, max(output.start, self.received + 1), known, now)
        self.gap.known = known

    def _take(self, output: Output, now: float) -> None:
        if output.start < self.received:
            output = output._replace(start=self.received, tokens=output.tokens[self.received - output.start :])
        self.generation.took(output.tokens, now)
        if self.gap is not None and output.tokens:
            self.gap.since = now
            if self.received >= self.gap.known:
                self.gap = None
        self.over = output.finish_reason is not None
        if (output.tokens or self.over) and not self._ended:
            self._pass(output)

    def _pass(self, output: Output) -> None:
        try:
            delta = self.read(output)
            if output.start == 0 and self.prompt is not None:
                delta = delta._replace(prompt=self.prompt)
            self._ended = delta.finish_reason is not None
            waits = self._waiting is not None and not self._waiting.done()
            if waits and self.sink.take is not None and self.sink.take(delta):
                return
            if not waits:
                self._count(delta)
        except Exception as error:
            self.fail(error)
        else:
            self._arrived.append(delta)
            self._wake()

    def _count(self, delta: Delta) -> None:
        """Count a delta whose reader has others to deal with. Raises ApiError if what waits is too much."""
        size = _DELTA_BYTES + sum([_TOKEN_BYTES * (1 + len(token.top_logprobs)) for token in delta.tokens])
        self.held.take(size)
        self._waiting_bytes += size

    def _failure(self, output: Output) -> Exception:
        if output.finish_reason in ("abort", "lost"):
            reason = f"aborted by its decode node: {output.error or 'no reason given'}"
            return NodeFailed(reason, died=output.finish_reason == "lost")
        if output.finish_reason == "invalid":
            field, reason = self.request.structure_field, output.error or "the request cannot be carried out"
            return ApiError(400, reason) if field is None else wrong(field, reason)
        self.warn("decode node ended a request with an error", reason=output.error)
        return self.request.failed("the request failed at its decode node")
