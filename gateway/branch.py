"""One answer while it is generated: its tokens become deltas, are counted, and its end is logged."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import structlog

from base.metrics import Metrics
from control.messages import Output
from gateway.attempt import Shortcut
from gateway.choice import Choice, Delta
from gateway.decode_client import DecodeClient
from gateway.errors import ApiError
from gateway.held_answers import AnswerBytes
from gateway.prepared import Prepared
from gateway.tokenizer import CheckpointTokenizer

log = structlog.get_logger(__name__)


class Branch:
    """The answer with this number of a request. Belongs to the gateway's event loop."""

    __slots__ = (
        "_choice",
        "_last",
        "_metrics",
        "_number",
        "_prepared",
        "_reason",
        "_request",
        "_tokenizer",
        "_tokens",
        "_ttft",
    )

    def __init__(self, prepared: Prepared, number: int, tokenizer: CheckpointTokenizer, metrics: Metrics) -> None:
        self._prepared = prepared
        self._number = number
        self._request = prepared.branches[number]
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._choice = Choice(tokenizer, prepared.text)
        self._tokens = 0
        self._ttft: float | None = None
        """Seconds."""
        self._last = 0.0
        """When the last token arrived (time.monotonic)."""
        self._reason = "cancelled"
        """Why it ended. Nobody sets it when the client cancels."""

    async def deltas(
        self, client: DecodeClient, held: AnswerBytes, shortcut: Shortcut
    ) -> AsyncGenerator[Sequence[Delta], None]:
        """Its deltas, as many as are there, but for those that go by the shortcut. held: counts those that wait here.

        Raises ApiError. Closing it early cancels the request.
        """
        request = self._request
        log.info(
            "request arrived",
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
            max_new_tokens=request.generate.max_new_tokens,
        )
        try:
            async with aclosing(client.stream(request, self._read, held, shortcut)) as answer:
                async for deltas in answer:
                    if deltas[-1].finish_reason is not None:
                        self._reason = deltas[-1].finish_reason
                        # The node does not know stop strings: closing the stream makes it stop.
                        await answer.aclose()
                    yield deltas
        except Exception as error:
            self._reason = (isinstance(error, ApiError) and error.code) or "error"
            raise
        finally:
            self._metrics.requests_finished.labels(reason=self._reason).inc()
            log.info(
                "request finished",
                request_id=request.request_id,
                reason=self._reason,
                tokens=self._tokens,
                ttft_s=None if self._ttft is None else round(self._ttft, 4),
                seconds=round(time.monotonic() - request.arrived, 4),
            )

    def _read(self, output: Output) -> Delta:
        if output.start == 0:
            self._choice = Choice(self._tokenizer, self._prepared.text)
            self._prepared.cached[self._number] = output.cached_tokens
            self._tokens = 0
        delta = self._choice.push(output)
        if tokens := len(delta.tokens):
            now = time.monotonic()
            if self._ttft is None:
                self._ttft = now - self._request.arrived
                self._metrics.ttft.observe(self._ttft)
            else:
                for _ in range(tokens):
                    self._metrics.inter_token.observe((now - self._last) / tokens)
            self._last = now
            self._tokens += tokens
        return delta
