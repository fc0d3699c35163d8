"""Streams tokens to gateways.

A gateway notices a lost message by the index of the next token and asks for what it has missed (`Resend`). So a
request's tokens are kept until the gateway says that it has all (`Ended`). Nothing would follow the last output, so
that one is repeated until then.

What is kept is bounded: a running request has at most `max_new_tokens`; an ended one is forgotten after `_KEPT_FOR_S`;
one that was given up (client or gateway gone, or an error) keeps its last output only.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import structlog

from base.metrics import Metrics
from control.messages import DraftCounts, FinishReason, Output, Outputs, Peer, Token
from control.plane import ControlPlane
from control.prompt_logprobs import PromptLogprobTable
from decode_node.request import Request, RequestState

log = structlog.get_logger(__name__)

_KEPT_FOR_S = 30.0
"""How long the end of a request is repeated, and its tokens are kept. By then a silent gateway is gone or gave up."""
_TOKENS_AGAIN = 1024
"""Tokens in one message at most when they are sent again: with twenty alternatives each they take some 300 KB."""

StreamKey = tuple[str, str, str]


class _NewTokens(NamedTuple):
    """Tokens of one request that do not end it. Fields as in Output.

    reported: the same tokens, if the request reports log probabilities. interval: seconds between two of them, and from
    the one before to the first, on average; None at its first token.
    """

    request_id: str
    start: int
    token_ids: Sequence[int]
    reported: Sequence[Token]
    interval: float | None
    cached_tokens: int
    drafts: DraftCounts

    def output(self) -> Output:
        """What a message says in addition to token ids."""
        reported = tuple(self.reported)
        return Output(self.request_id, self.start, reported, cached_tokens=self.cached_tokens, drafts=self.drafts)


class StreamedTokens:
    """Tokens by index, in arrays: 4 bytes each, or 20 and 12 for each alternative if they are reported. As objects they
    would take kilobytes."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._ids = array("i")
        self._logprobs = array("d")
        """Of each token, as the arrays below; or all of these are empty."""
        self._top_ids = array("i")
        self._top_logprobs = array("d")
        self._top_stops = array("q")
        """Where each token's alternatives end in _top_ids and _top_logprobs."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def stop(self) -> int:
        """Index of the next token."""
        return self._first + len(self)

    def extend(self, token_ids: Sequence[int], reported: Sequence[Token] = ()) -> None:
        """reported: the same tokens with their log probabilities, of a request that reports them."""
        self._ids.extend(token_ids)
        for token in reported:
            assert token.logprob is not None, "it is reported"
            self._logprobs.append(token.logprob)
            for token_id, logprob in token.top_logprobs:
                self._top_ids.append(token_id)
                self._top_logprobs.append(logprob)
            self._top_stops.append(len(self._top_ids))

    def between(self, start: int, stop: int) -> tuple[Token, ...]:
        """The tokens with an index in [start, stop) that there are."""
        places = range(max(start - self._first, 0), min(stop - self._first, len(self)))
        return tuple(self._token(place) for place in places)

    def _token(self, index: int) -> Token:
        if not self._logprobs:
            return Token(self._ids[index])
        top = slice(self._top_stops[index - 1] if index else 0, self._top_stops[index])
        return Token(
            token_id=self._ids[index],
            logprob=self._logprobs[index],
            top_logprobs=tuple(zip(self._top_ids[top], self._top_logprobs[top], strict=True)),
        )


@dataclass
class _Stream:
    """What a gateway was sent of a request. last: the output that ended it. cached_tokens, drafts: see Output."""

    key: StreamKey
    gateway: Peer
    tokens: StreamedTokens
    prompt: PromptLogprobTable | None = None
    last: Output | None = None
    cached_tokens: int = 0
    drafts: DraftCounts = (0, 0)


class OutputStream:
    """Collects the outputs of one turn of the loop and sends one message per gateway."""

    def __init__(self, control: ControlPlane, metrics: Metrics) -> None:
        self._control = control
        self._metrics = metrics
        self._new: dict[str, tuple[Peer, list[_NewTokens]]] = {}
        """Those of this turn, by the boot id of the gateway that they are for."""
        self._last: list[_Stream] = []
        """Streams whose last output is not sent yet."""
        self._begun: list[_Stream] = []
        """Streams with log probabilities of the prompt that were not sent yet."""
        self._new_tokens = 0
        """Tokens since the last flush, for the metrics."""
        self._streams: dict[StreamKey, _Stream] = {}
        """Of requests of which the gateway may have missed something."""
        self._ended_at: dict[StreamKey, float] = {}
        """When the ended ones among them ended (time.monotonic), earliest first."""

    def tokens(
        self, request: Request, token_ids: Sequence[int], reason: FinishReason | None, reported: Sequence[Token] = ()
    ) -> None:
        """Stream the tokens of a step, at least one, which were just added to the request.

        reason: why the last of them ends the request. reported: the same tokens, if it reports log probabilities.
        """
        now = time.monotonic()
        start = len(request.generated) - len(token_ids)
        interval = (now - request.last_token_at) / len(token_ids) if start > request.resumed_at else None
        if interval is None:
            self._metrics.ttft.observe(now - request.arrived)
            self._metrics.note_stages(
                len(request.generate.prompt_ids),
                queue=request.spent[RequestState.WAITING],
                admission=request.spent[RequestState.LANDED],
                first_step=now - request.moved_at,
            )
            request.stage.record("first step", request.moved_at)
        request.last_token_at = now
        self._new_tokens += len(token_ids)
        stream = self._stream_of(request)
        stream.tokens.extend(token_ids, reported)
        stream.cached_tokens = request.cached_tokens or 0
        if request.generate.counts_drafts:
            stream.drafts = request.drafted, request.accepted
        if not start and request.prompt_logprobs is not None:
            stream.prompt = request.prompt_logprobs
            self._begun.append(stream)
        # The last output is repeated until the gateway has it: it has one token.
        new = len(token_ids) - (reason is not None)
        if new:
            cached_tokens = 0 if interval is not None else stream.cached_tokens
            _, of_gateway = self._new.setdefault(stream.gateway.boot_id, (stream.gateway, []))
            of_gateway.append(
                _NewTokens(
                    request.request_id, start, token_ids[:new], reported[:new], interval, cached_tokens, stream.drafts
                )
            )
        elif interval is not None:
            self._metrics.inter_token.observe(interval)
        if reason is not None:
            last = Output(
                request_id=request.request_id,
                start=start + new,
                tokens=stream.tokens.between(start + new, start + new + 1),
                finish_reason=reason,
                cached_tokens=stream.cached_tokens,
                drafts=stream.drafts,
            )
            self._end(stream, last, reason)

    def end(self, request: Request, finish_reason: FinishReason, error: str | None = None) -> None:
        """End the stream of a request that was given up. The gateway needs none of its tokens any more."""
        start = len(request.generated)
        output = Output(request_id=request.request_id, start=start, finish_reason=finish_reason, error=error)
        stream = self._stream_of(request)
        stream.tokens, stream.prompt = StreamedTokens(), None
        self._end(stream, output, finish_reason)

    def unknown(self, request_id: str, gateway: Peer) -> None:
        """Answer for a request that is not here, or not any more, with an abort."""
        self._forget(_key(request_id, gateway))
        abort = Output(request_id=request_id, start=0, finish_reason="abort")
        self._control.send(gateway, Outputs.of([abort]))

    def ended(self, request_id: str, gateway: Peer) -> None:
        """The gateway has all tokens of the request and knows that it ended."""
        key = _key(request_id, gateway)
        self._control.answered(key)
        self._forget(key)

    def resend(self, request_id: str, start: int, gateway: Peer) -> None:
        """Send the tokens from `start` on again, and the end of the request if it has ended.

        From 0 on: what comes before the first token, too.
        If nothing of it is kept, send an abort: the gateway cannot complete it.
        """
        stream = self._streams.get(_key(request_id, gateway))
        if stream is None:
            self.unknown(request_id, gateway)
            return
        stop = stream.tokens.stop
        log.info("tokens are sent again", request_id=request_id, start=start, tokens=max(0, stop - start))
        if not start:
            self._send_prompt(stream)
        for first in range(start, stop, _TOKENS_AGAIN):
            tokens = stream.tokens.between(first, first + _TOKENS_AGAIN)
            cached_tokens = 0 if first else stream.cached_tokens
            output = Output(request_id, first, tokens, cached_tokens=cached_tokens, drafts=stream.drafts)
            self._control.send(gateway, Outputs.of([output]))
        if stream.last is not None:
            self._control.send(gateway, Outputs.of([stream.last]))

    def flush(self) -> None:
        self._metrics.generated_tokens.inc(self._new_tokens)
        self._new_tokens = 0
        for stream in self._begun:
            self._send_prompt(stream)
        self._begun.clear()
        for gateway, new in self._new.values():
            self._control.send(gateway, partial(self._message_of, new))
        self._new.clear()
        # After the tokens that came before them.
        for stream in self._last:
            assert stream.last is not None
            self._control.repeat(stream.key, stream.gateway, Outputs.of([stream.last]), give_up_after=_KEPT_FOR_S)
        self._last.clear()
        now = time.monotonic()
        for key in [*takewhile(lambda key: now - self._ended_at[key] > _KEPT_FOR_S, self._ended_at)]:
            self._forget(key)

    def _send_prompt(self, stream: _Stream) -> None:
        """Send the log probabilities of a prompt, piece by piece."""
        for piece in () if stream.prompt is None else stream.prompt.pieces():
            output = Output(request_id=stream.key[1], start=0, prompt_logprobs=piece)
            self._control.send(stream.gateway, Outputs.of([output]))

    def _message_of(self, new: list[_NewTokens]) -> Outputs:
        """Called by the control thread, while the loop goes on."""
        for one in new:
            if one.interval is not None:
                self._metrics.inter_token.observe(one.interval)
        more = {
            row: one.output() for row, one in enumerate(new) if one.reported or one.cached_tokens or any(one.drafts)
        }
        columns = [one.request_id for one in new], [one.start for one in new], [one.token_ids for one in new]
        return Outputs.of_columns(*columns, more)

    def _stream_of(self, request: Request) -> _Stream:
        key = _key(request.request_id, request.gateway)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(key, request.gateway, StreamedTokens(request.resumed_at))
        return stream

    def _end(self, stream: _Stream, last: Output, reason: FinishReason) -> None:
        stream.last = last
        self._last.append(stream)
        self._ended_at[stream.key] = time.monotonic()
        self._metrics.requests_finished.labels(reason).inc()

    def _forget(self, key: StreamKey) -> None:
        self._streams.pop(key, None)
        self._ended_at.pop(key, None)


def _key(request_id: str, gateway: Peer) -> StreamKey:
    return "ended", request_id, gateway.boot_id
