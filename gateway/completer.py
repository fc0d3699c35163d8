"""From a request's body to a stream of deltas: parse, tokenize, check against the context, generate, account."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from base.metrics import Metrics
from gateway.api import ChatCompletionRequest, CompletionRequest, check_token_ids, parse
from gateway.choice import Choice, Delta
from gateway.errors import ApiError, timed_out
from gateway.generation import DecodeClient, Job
from gateway.registry import Capacity, NodeRegistry
from gateway.tokenizer import CheckpointTokenizer

log = structlog.get_logger(__name__)

Asked = CompletionRequest | ChatCompletionRequest
_Result = TypeVar("_Result")

_SMALL_BYTES = 64 << 10
_THREADS = 2
"""For small requests, and as many for large ones."""


@dataclass
class _Account:
    """What one request did, for metrics and the log."""

    metrics: Metrics
    arrived: float
    tokens: int = 0
    ttft: float | None = None
    last: float = field(init=False)
    reason: str = "cancelled"
    """How it ended; a request that is simply dropped was cancelled by its client."""

    def __post_init__(self) -> None:
        self.last = self.arrived

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

    Parsing and tokenizing take time in proportion to the request, so threads do it; large requests have threads of
    their own, since one of them takes as long as thousands of small ones.
    """

    def __init__(
        self,
        tokenizer: CheckpointTokenizer,
        client: DecodeClient,
        registry: NodeRegistry,
        metrics: Metrics,
        context_length: int,
        request_timeout: float,
    ) -> None:
        self.tokenizer = tokenizer
        self._client = client
        self._registry = registry
        self._metrics = metrics
        self._context_length = context_length
        self._request_timeout = request_timeout
        self._small = ThreadPoolExecutor(_THREADS, thread_name_prefix="small")
        self._large = ThreadPoolExecutor(_THREADS, thread_name_prefix="large")

    @property
    def capacity(self) -> Capacity:
        """The largest request that is taken now."""
        return self._registry.capacity(self._context_length, time.monotonic())

    async def job(self, body: bytes, kind: type[Asked], check_model: Callable[[str | None], None]) -> tuple[Asked, Job]:
        """Parse, check and tokenize a request. Raises ApiError if it is none, or one that the model cannot take.

        `check_model` raises ApiError for a model's name that is not ours.
        """
        arrived = time.monotonic()
        capacity = self.capacity
        threads = self._small if len(body) <= _SMALL_BYTES else self._large

        def read() -> tuple[Asked, tuple[int, ...], int]:
            request = parse(kind, body)
            check_model(request.model)
            if request.token_ids:
                # Cheaper than to look at each of them.
                request.max_new_tokens(len(request.token_ids), capacity)
            prompt_ids = tuple(self._prompt_ids(request))
            return request, prompt_ids, request.max_new_tokens(len(prompt_ids), capacity)

        request, prompt_ids, max_new_tokens = await self._in_time(threads, read)
        name = "cmpl" if isinstance(request, CompletionRequest) else "chatcmpl"
        return request, Job(
            request_id=f"{name}-{uuid.uuid4().hex}",
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=request.sampling(),
            stop_token_ids=(
                *(() if request.ignore_eos else self.tokenizer.stop_token_ids),
                *(request.stop_token_ids or ()),
            ),
            streams=bool(request.stream),
            arrived=arrived,
            deadline=arrived + self._request_timeout,
        )

    async def whole(self, job: Job, stops: Sequence[str]) -> list[Delta]:
        """The answer at once, all of it from one node. Raises ApiError."""
        answer: list[Delta] = []
        async with aclosing(self.deltas(job, stops)) as deltas:
            async for delta in deltas:
                if delta.begins:
                    answer.clear()
                answer.append(delta)
        return answer

    async def deltas(self, job: Job, stops: Sequence[str]) -> AsyncGenerator[Delta, None]:
        """The answer, piece by piece. Raises ApiError. Closing it early cancels the request."""
        account = _Account(self._metrics, job.arrived)
        log.info(
            "request arrived",
            request_id=job.request_id,
            prompt_tokens=len(job.prompt_ids),
            max_new_tokens=job.max_new_tokens,
        )
        try:
            async with aclosing(self._client.stream(job)) as steps:
                async for step in steps:
                    if step.begins:
                        choice = Choice(self.tokenizer, stops, job.stop_token_ids)
                        account.tokens = 0
                    delta = choice.push(step)
                    account.add(len(delta.tokens))
                    if delta.finish_reason is not None:
                        account.reason = delta.finish_reason
                        # A stop string ends the answer here, and is no reason for its node to stop until told.
                        await steps.aclose()
                    yield delta
        except ApiError as error:
            account.reason = error.code or "error"
            raise
        except Exception:
            account.reason = "error"
            raise
        finally:
            self._metrics.requests_finished.labels(reason=account.reason).inc()
            log.info(
                "request finished",
                request_id=job.request_id,
                reason=account.reason,
                tokens=account.tokens,
                ttft_s=None if account.ttft is None else round(account.ttft, 4),
                seconds=round(time.monotonic() - job.arrived, 4),
            )

    def close(self) -> None:
        for threads in (self._small, self._large):
            threads.shutdown(cancel_futures=True)

    async def _in_time(self, threads: ThreadPoolExecutor, work: Callable[[], _Result]) -> _Result:
        """What the threads make of it. Raises ApiError (504) if that takes longer than a request may."""
        try:
            async with asyncio.timeout(self._request_timeout):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except TimeoutError:
            raise timed_out() from None

    def _prompt_ids(self, request: Asked) -> list[int]:
        if isinstance(request, ChatCompletionRequest):
            text = self.tokenizer.render_chat(
                [message.rendered() for message in request.messages], request.chat_template_kwargs or {}
            )
            token_ids = self.tokenizer.encode(text, special_tokens=False)
        elif isinstance(request.prompt, str):
            token_ids = self.tokenizer.encode(request.prompt, special_tokens=True)
        else:
            token_ids = request.token_ids
            check_token_ids(token_ids, self.tokenizer.vocab_size)
        if not token_ids:
            raise ApiError(400, "the prompt has no tokens: expected at least one", param="prompt")
        return token_ids
