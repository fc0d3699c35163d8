"""The answers of a request while they are generated: each one's tokens become deltas, and all are one stream."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from base.metrics import Metrics
from control.messages import Output
from control.prompt_logprobs import PromptLogprobTable
from gateway.attempt import Delta, DeltaSink
from gateway.decode_client import DecodeClient
from gateway.detokenizer import ChoiceText
from gateway.errors import ApiError
from gateway.generation import TokenizedRequest
from gateway.held_answers import HeldBytes

log = structlog.get_logger(__name__)

_T = TypeVar("_T")
_QUEUED = 16
"""Elements that streams may have ready before they are read."""


@dataclass(eq=False)
class ChoiceStream:
    """One answer of a request. Belongs to the gateway's event loop.

    Choices of one prompt have the same log probabilities of its tokens, which are computed for the first of them alone.
    The first deltas of the others wait for these, so all choices have to be read at the same time. shared_prompt: these
    log probabilities; None if nothing is shared.
    """

    request: TokenizedRequest
    text: ChoiceText
    metrics: Metrics
    shared_prompt: asyncio.Future[PromptLogprobTable] | None
    _last: float = field(init=False, default=0.0)
    """When the last token arrived (time.monotonic)."""

    async def deltas(
        self, client: DecodeClient, held: HeldBytes, sink: DeltaSink
    ) -> AsyncGenerator[Sequence[Delta], None]:
        """Its deltas, as many as are there, but for those that the sink takes. Raises ApiError. Closing it cancels."""
        request, outcome = self.request, self.request.outcome
        log.debug(
            "request arrived",
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
            max_new_tokens=request.generate.max_new_tokens,
        )
        try:
            async with aclosing(client.stream(request, self._read, held, sink)) as answer:
                async for deltas in answer:
                    if deltas[-1].finish_reason is not None:
                        outcome.reason = deltas[-1].finish_reason
                        # The node does not know stop strings: closing the stream makes it stop.
                        await answer.aclose()
                    yield deltas if self.shared_prompt is None else await _with_prompt(deltas, self.shared_prompt)
        except Exception as error:
            outcome.reason = (isinstance(error, ApiError) and error.code) or "error"
            raise
        finally:
            self.metrics.requests_finished.labels(reason=outcome.reason).inc()
            self.metrics.migrations.inc(outcome.migrations)

    def _read(self, output: Output) -> Delta:
        outcome = self.request.outcome
        if output.start == 0:
            outcome.cached_tokens = output.cached_tokens
        if self.request.generate.counts_drafts:
            outcome.note_drafts(output.drafts)
        delta = self.text.push(output)
        if tokens := len(delta.tokens):
            now = time.monotonic()
            if outcome.ttft is None:
                outcome.ttft = now - self.request.arrived
                self.metrics.ttft.observe(outcome.ttft)
            else:
                for _ in range(tokens):
                    self.metrics.inter_token.observe((now - self._last) / tokens)
            self._last = now
            outcome.tokens += tokens
        return delta


async def _with_prompt(deltas: Sequence[Delta], shared: asyncio.Future[PromptLogprobTable]) -> Sequence[Delta]:
    """The deltas of a choice, the first of all with what is shared, which one choice brings."""
    first, *others = deltas
    if first.prompt is not None and not shared.done():
        shared.set_result(first.prompt)
    return [first._replace(prompt=await shared), *others] if first.first else deltas


async def merged(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """What the streams yield, with the index of the stream. All are closed after the first error, or with this one."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for element in only:
                yield 0, element
        return
    ready: asyncio.Queue[tuple[int, _T] | Exception | None] = asyncio.Queue(_QUEUED)

    async def read(index: int, stream: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(stream):
                async for element in stream:
                    await ready.put((index, element))
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    reading = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            match await ready.get():
                case None:
                    open_streams -= 1
                case Exception() as error:
                    raise error
                case (index, element):
                    yield index, element
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
