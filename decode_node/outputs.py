"""Streams tokens back to the gateways that asked for them."""

import time
from collections import defaultdict

from decode_node.request import Request
from service.metrics import Metrics
from transfer.control import ControlPlane
from transfer.messages import FinishReason, Output, Outputs, Peer, Token


class OutputStream:
    """Collects what one turn of the loop produced and sends one message per gateway."""

    def __init__(self, control: ControlPlane, metrics: Metrics) -> None:
        self._control = control
        self._metrics = metrics
        self._pending: dict[Peer, list[Output]] = defaultdict(list)

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

    def flush(self) -> None:
        for gateway, outputs in self._pending.items():
            self._control.send(gateway, Outputs(outputs=tuple(outputs)))
        self._pending.clear()

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
        self._pending[request.gateway].append(output)
        if finish_reason is not None:
            self._metrics.requests_finished.labels(finish_reason).inc()
