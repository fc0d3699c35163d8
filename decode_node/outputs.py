"""Streams tokens back to the gateways that asked for them.

A message that is lost shows by the index of the next token, so only the last one is repeated until it is answered.
"""

import time
from collections import defaultdict

from base.metrics import Metrics
from control.messages import FinishReason, Output, Outputs, Peer, Token
from control.plane import ControlPlane
from decode_node.request import Request

_LAST_FOR_S = 30.0
"""How long the end of a request is told to a gateway that does not answer: it is gone, or has given up by then."""


class OutputStream:
    """Collects what one turn of the loop produced and sends one message per gateway."""

    def __init__(self, control: ControlPlane, metrics: Metrics) -> None:
        self._control = control
        self._metrics = metrics
        self._pending: dict[Peer, list[Output]] = defaultdict(list)
        self._last: dict[Peer, list[Output]] = defaultdict(list)
        """Outputs that end a request."""

    def token(self, request: Request, token: Token, finish_reason: FinishReason | None) -> None:
        """Stream a token that was just appended to the request."""
        now = time.monotonic()
        if len(request.generated) == 1:
            self._metrics.ttft.observe(now - request.arrived)
        else:
            self._metrics.inter_token.observe(now - request.last_token_at)
        request.last_token_at = now
        self._metrics.generated_tokens.inc()
        self._add(request, len(request.generated) - 1, (token,), finish_reason)

    def end(self, request: Request, finish_reason: FinishReason, error: str | None = None) -> None:
        """Say that no more tokens will come."""
        self._add(request, len(request.generated), (), finish_reason, error)

    def unknown(self, request_id: str, gateway: Peer) -> None:
        """Answer for a request that is not here: nothing of it is left."""
        self._pending[gateway].append(Output(request_id=request_id, start=0, finish_reason="abort"))

    def ended(self, request_id: str, gateway: Peer) -> None:
        """The gateway has heard that the request is over."""
        self._control.answered(_key(request_id, gateway))

    def flush(self) -> None:
        for gateway, outputs in self._pending.items():
            self._control.send(gateway, Outputs(outputs=tuple(outputs)))
        # After the tokens that came before them.
        for gateway, outputs in self._last.items():
            for output in outputs:
                key = _key(output.request_id, gateway)
                self._control.repeat(key, gateway, Outputs(outputs=(output,)), give_up_after=_LAST_FOR_S)
        self._pending.clear()
        self._last.clear()

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
            self._metrics.requests_finished.labels(finish_reason).inc()


def _key(request_id: str, gateway: Peer) -> tuple[str, str, str]:
    return "ended", request_id, gateway.boot_id
