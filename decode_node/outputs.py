"""Streams tokens back to the gateways that asked for them.

A message that is lost shows by the index of the next token: the gateway asks for what it has missed (`Resend`), so all
tokens of a request are kept until it says that it has them (`Ended`). After the last one nothing would show that it was
lost, so the output that ends a request is repeated until then.

What is kept is bounded: a running request has at most its `max_new_tokens`, one that has ended is forgotten after
`_KEPT_FOR_S`, and one that was given up (its client or its gateway has gone, or it failed) keeps its last output only.
"""

import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

import structlog

from base.metrics import Metrics
from control.messages import FinishReason, Output, Outputs, Peer, Token
from control.plane import ControlPlane
from decode_node.request import Request
from decode_node.streamed_tokens import StreamedTokens

log = structlog.get_logger(__name__)

_KEPT_FOR_S = 30.0
"""How long a gateway that does not answer is told of the end of a request, and may ask for its tokens: it is gone, or
has given up by then."""
_TOKENS_AGAIN = 1024
"""In one message, at most: with twenty alternatives each they take some 300 KB."""

Key = tuple[str, str, str]


@dataclass
class _Stream:
    """What a gateway was sent of a request."""

    tokens: StreamedTokens = field(default_factory=StreamedTokens)
    last: Output | None = None
    """The output that ended it."""


class OutputStream:
    """Collects what one turn of the loop produced and sends one message per gateway."""

    def __init__(self, control: ControlPlane, metrics: Metrics) -> None:
        self._control = control
        self._metrics = metrics
        self._pending: dict[Peer, list[Output]] = defaultdict(list)
        self._last: dict[Peer, list[Output]] = defaultdict(list)
        """Outputs that end a request."""
        self._streams: dict[Key, _Stream] = {}
        """Of requests of which the gateway may have missed something."""
        self._over_since: OrderedDict[Key, float] = OrderedDict()
        """When those of them that are over have ended (time.monotonic), the first to end first."""

    @property
    def tokens_kept(self) -> int:
        """Tokens that a gateway may ask for again."""
        return sum(len(stream.tokens) for stream in self._streams.values())

    def token(self, request: Request, token: Token, finish_reason: FinishReason | None) -> None:
        """Stream a token that was just appended to the request."""
        now = time.monotonic()
        if len(request.generated) == 1:
            self._metrics.ttft.observe(now - request.arrived)
        else:
            self._metrics.inter_token.observe(now - request.last_token_at)
        request.last_token_at = now
        self._metrics.generated_tokens.inc()
        self._stream_of(request).tokens.append(token)
        self._add(request, len(request.generated) - 1, (token,), finish_reason)

    def end(self, request: Request, finish_reason: FinishReason, error: str | None = None) -> None:
        """Say that no more tokens will come. Those that came are of no use to the gateway any more."""
        self._stream_of(request).tokens = StreamedTokens()
        self._add(request, len(request.generated), (), finish_reason, error)

    def unknown(self, request_id: str, gateway: Peer) -> None:
        """Answer for a request that is not here, or not any more: nothing of it is left."""
        self._forget(_key(request_id, gateway))
        self._pending[gateway].append(Output(request_id=request_id, start=0, finish_reason="abort"))

    def ended(self, request_id: str, gateway: Peer) -> None:
        """The gateway has all of the request and knows that it is over."""
        key = _key(request_id, gateway)
        self._control.answered(key)
        self._forget(key)

    def resend(self, request_id: str, start: int, gateway: Peer) -> None:
        """The gateway has missed tokens: send those from `start` on again, and the end of the request if it is over.

        If nothing is kept of it, an abort: it cannot be completed.
        """
        stream = self._streams.get(_key(request_id, gateway))
        if stream is None:
            self.unknown(request_id, gateway)
            return
        count = len(stream.tokens)
        log.info("tokens are sent again", request_id=request_id, start=start, tokens=max(0, count - start))
        for first in range(start, count, _TOKENS_AGAIN):
            tokens = stream.tokens.between(first, first + _TOKENS_AGAIN)
            output = Output(request_id=request_id, start=first, tokens=tokens)
            self._control.send(gateway, Outputs(outputs=(output,)))
        if stream.last is not None:
            self._control.send(gateway, Outputs(outputs=(stream.last,)))

    def flush(self) -> None:
        for gateway, outputs in self._pending.items():
            self._control.send(gateway, Outputs(outputs=tuple(outputs)))
        # After the tokens that came before them.
        for gateway, outputs in self._last.items():
            for output in outputs:
                key = _key(output.request_id, gateway)
                self._control.repeat(key, gateway, Outputs(outputs=(output,)), give_up_after=_KEPT_FOR_S)
        self._pending.clear()
        self._last.clear()
        self._forget_old(time.monotonic())

    def _stream_of(self, request: Request) -> _Stream:
        return self._streams.setdefault(_key(request.request_id, request.gateway), _Stream())

    def _add(
        self,
        request: Request,
        start: int,
        tokens: tuple[Token, ...],
        finish_reason: FinishReason | None,
        error: str | None = None,
    ) -> None:
        output = Output(
            request_id=request.request_id, start=start, tokens=tokens, finish_reason=finish_reason, error=error
        )
        if finish_reason is None:
            self._pending[request.gateway].append(output)
        else:
            self._last[request.gateway].append(output)
            self._stream_of(request).last = output
            self._over_since[_key(request.request_id, request.gateway)] = time.monotonic()
            self._metrics.requests_finished.labels(finish_reason).inc()

    def _forget(self, key: Key) -> None:
        self._streams.pop(key, None)
        self._over_since.pop(key, None)

    def _forget_old(self, now: float) -> None:
        while self._over_since and now - next(iter(self._over_since.values())) > _KEPT_FOR_S:
            self._forget(next(iter(self._over_since)))


def _key(request_id: str, gateway: Peer) -> Key:
    return "ended", request_id, gateway.boot_id
