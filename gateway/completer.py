"""From a request's body to a stream of deltas: parse, tokenize, check lengths, generate, count."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from base.metrics import Metrics
from gateway.api import ChatCompletionRequest, CompletionRequest, parse
from gateway.attempt import TokenizedRequest
from gateway.choice import Choice, Delta
from gateway.config import GatewayConfig
from gateway.decode_client import DecodeClient
from gateway.errors import ApiError, timed_out
from gateway.registry import Capacity, NodeRegistry
from gateway.tokenizer import CheckpointTokenizer

log = structlog.get_logger(__name__)

ApiRequest = CompletionRequest | ChatCompletionRequest

_SMALL_BYTES = 64 << 10
_THREADS = 2
"""Threads for small requests, and the same number for large ones."""


@dataclass
class _RequestStats:
    """Counts and times of one request, for metrics and the log."""

    metrics: Metrics
    arrived: float
    tokens: int = 0
    ttft: float | None = None
    last: float = 0.0
    """When the last token arrived (time.monotonic)."""
    reason: str = "cancelled"
    """Why it ended. Nobody sets it when the client cancels."""

    def add(self, count: int) -> None:
        if not count:
            return
        now = time.monotonic()
        if self.ttft is None:
            self.ttft = now - self.arrived
            self.metrics.ttft.observe(self.ttft)
        else:
            for _ in range(count):
                self.metrics.inter_token.observe((now - self.last) / count)
        self.last = now
        self.tokens += count


class Completer:
    """Turns requests into answers. Belongs to the gateway's event loop.

    Threads parse and tokenize. Large requests have threads of their own, since one may take as long as thousands of
    small ones.
    """

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: CheckpointTokenizer,
        client: DecodeClient,
        registry: NodeRegistry,
        metrics: Metrics,
        context_length: int,
    ) -> None:
        self.model = config.model_name
        self.tokenizer = tokenizer
        self._client = client
        self._registry = registry
        self._metrics = metrics
        self._context_length = context_length
        self._request_timeout = config.request_timeout
        self._small = ThreadPoolExecutor(_THREADS, thread_name_prefix="small")
        self._large = ThreadPoolExecutor(_THREADS, thread_name_prefix="large")

    @property
    def capacity(self) -> Capacity:
        """The largest request that can be served now."""
        return self._registry.capacity(self._context_length, time.monotonic())

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) for a model that is not served. None stands for the one that is."""
        if model is not None and model != self.model:
            message = f"the model {model!r} does not exist; this server serves {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenize(self, body: bytes, kind: type[ApiRequest]) -> tuple[ApiRequest, TokenizedRequest]:
        """Parse, check and tokenize a request. Raises ApiError (504 if that takes longer than a request may)."""
        arrived = time.monotonic()
        capacity = self.capacity
        threads = self._small if len(body) <= _SMALL_BYTES else self._large

        def read() -> tuple[ApiRequest, tuple[int, ...], int]:
            request = parse(kind, body)
            self.check_model(request.model)
            prompt_ids = tuple(self._prompt_ids(request, capacity))
            return request, prompt_ids, request.max_new_tokens(len(prompt_ids), capacity)

        try:
            async with asyncio.timeout(self._request_timeout):
                request, prompt_ids, max_new_tokens = await asyncio.get_running_loop().run_in_executor(threads, read)
        except TimeoutError:
            raise timed_out() from None
        name = "cmpl" if isinstance(request, CompletionRequest) else "chatcmpl"
        own_stops = () if request.ignore_eos else self.tokenizer.stop_token_ids
        return request, TokenizedRequest(
            request_id=f"{name}-{uuid.uuid4().hex}",
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=request.sampling(),
            stop_token_ids=(*own_stops, *(request.stop_token_ids or ())),
            streams=bool(request.stream),
            arrived=arrived,
            deadline=arrived + self._request_timeout,
        )

    async def whole(self, request: TokenizedRequest, stops: Sequence[str]) -> list[Delta]:
        """The complete answer, all of it from one node. Raises ApiError."""
        answer: list[Delta] = []
        async with aclosing(self.deltas(request, stops)) as deltas:
            async for delta in deltas:
                if delta.first:
                    answer.clear()
                answer.append(delta)
        return answer

    async def deltas(self, request: TokenizedRequest, stops: Sequence[str]) -> AsyncGenerator[Delta, None]:
        """The answer, piece by piece. Raises ApiError. Closing it early cancels the request."""
        stats = _RequestStats(self._metrics, request.arrived)
        log.info(
            "request arrived",
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
            max_new_tokens=request.max_new_tokens,
        )
        try:
            async with aclosing(self._client.stream(request)) as answer:
                async for new in answer:
                    if new.first:
                        choice = Choice(self.tokenizer, stops, request.stop_token_ids)
                        stats.tokens = 0
                    delta = choice.push(new)
                    stats.add(len(delta.tokens))
                    if delta.finish_reason is not None:
                        stats.reason = delta.finish_reason
                        # The node does not know stop strings: closing the stream makes it stop.
                        await answer.aclose()
                    yield delta
        except Exception as error:
            stats.reason = (isinstance(error, ApiError) and error.code) or "error"
            raise
        finally:
            self._metrics.requests_finished.labels(reason=stats.reason).inc()
            log.info(
                "request finished",
                request_id=request.request_id,
                reason=stats.reason,
                tokens=stats.tokens,
                ttft_s=None if stats.ttft is None else round(stats.ttft, 4),
                seconds=round(time.monotonic() - request.arrived, 4),
            )

    def close(self) -> None:
        for threads in (self._small, self._large):
            threads.shutdown(cancel_futures=True)

    def _prompt_ids(self, request: ApiRequest, capacity: Capacity) -> list[int]:
        if isinstance(request, ChatCompletionRequest):
            text = self.tokenizer.render_chat(
                [message.rendered() for message in request.messages], request.chat_template_kwargs or {}
            )
            token_ids = self.tokenizer.encode(text, special_tokens=False)
        elif isinstance(request.prompt, str):
            token_ids = self.tokenizer.encode(request.prompt, special_tokens=True)
        else:
            token_ids = request.prompt
            # Refuse one that is too long before looking at each id.
            request.max_new_tokens(len(token_ids), capacity)
            limit = self.tokenizer.vocab_size
            for position, token_id in enumerate(token_ids):
                if not 0 <= token_id < limit:
                    found = f"found {token_id} at position {position}"
                    raise ApiError(400, f"prompt: expected token ids from 0 to {limit - 1}, {found}", param="prompt")
        if not token_ids:
            raise ApiError(400, "the prompt has no tokens: expected at least one", param="prompt")
        return token_ids
