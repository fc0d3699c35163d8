"""From a request's body to a stream of deltas: parse and prepare on a thread, then generate."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from base.metrics import Metrics
from base.tracing import NO_SPAN, TraceSpan
from control.prompt_logprobs import PromptLogprobTable
from gateway.answers.streamed import Answer, encode_json
from gateway.attempt import Delta, DeltaSink
from gateway.choice_stream import ChoiceStream, merged
from gateway.config import GatewayConfig
from gateway.decode_client import DecodeClient
from gateway.detokenizer import ChoiceText
from gateway.errors import ApiError, shown, timed_out
from gateway.held_answers import HeldBytes
from gateway.keys import Client
from gateway.preparer import ApiRequest, Arrival, GenerationBody, PreparedRequest, Preparer
from gateway.registry import Capacity, NodeRegistry
from gateway.requests.body import FieldPolicy, RequestBody, parse

_SMALL_BYTES = 64 << 10
_LOGPROBS_AT_ONCE = 4096
"""Tokens and alternatives, which become JSON in 2 us each."""
_THREADS = 2
"""Threads for small requests, and the same number for large ones."""

_Body = TypeVar("_Body", bound=RequestBody)
_Result = TypeVar("_Result")


@dataclass(eq=False)
class Completer:
    """Turns requests into answers. Belongs to the gateway's event loop.

    Threads parse and tokenize. Large requests have threads of their own, since one may take as long as thousands of
    small ones.
    """

    config: GatewayConfig
    preparer: Preparer
    client: DecodeClient
    registry: NodeRegistry
    metrics: Metrics
    context_length: int

    def __post_init__(self) -> None:
        self.model, *_ = self.config.model_names
        self.created = int(time.time())
        """When the model was first served here, in seconds of Unix time."""
        self.tokenizer = self.preparer.tokenizer
        self.field_policy = FieldPolicy(self.config.strict_fields)
        self._small = ThreadPoolExecutor(_THREADS, thread_name_prefix="small")
        self._large = ThreadPoolExecutor(_THREADS, thread_name_prefix="large")
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        """For large answers. It is one, since all threads share a lock with the event loop."""

    @property
    def capacity(self) -> Capacity:
        """The largest request that can be served now."""
        return self.registry.capacity(self.context_length, time.monotonic())

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) for a model that is not served. None stands for the one that is."""
        if model is not None and model not in (names := self.config.model_names):
            served = ", ".join(map(repr, names))
            message = f"the model {shown(model)} does not exist; this server serves {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def prepare(
        self, body: bytes, kind: type[GenerationBody], id_prefix: str, client: Client, span: TraceSpan = NO_SPAN
    ) -> PreparedRequest:
        """Parse, check and tokenize a request. id_prefix: of its answers' ids. Raises ApiError, as `read` does."""
        now = time.monotonic()
        salt_key = client.key if self.config.prefix_cache_per_key else None
        arrival = Arrival(now, now + self.config.request_timeout, self.capacity, salt_key, span)
        may_go_first = self.config.allow_priority or client.goes_first

        def prepared(request: GenerationBody) -> PreparedRequest:
            with request.renaming():
                generation = request.generation(self.field_policy)
                self._check_priority(generation, may_go_first)
                return self.preparer.prepared(request, generation, id_prefix, arrival)

        request = await self.read(body, kind, prepared)
        span.note(lambda: {"gen_ai.request.model": self.model, "gen_ai.response.model": self.model})
        span.record("tokenize", now, attributes=lambda: {"prompt_tokens": request.prompt_tokens})
        return request

    async def read(self, body: bytes, kind: type[_Body], work: Callable[[_Body], _Result]) -> _Result:
        """What `work` makes of a body, on a thread. Raises ApiError (504 if that takes longer than a request may)."""
        threads = self._small if len(body) <= _SMALL_BYTES else self._large

        def parsed() -> _Result:
            request = parse(kind, body, self.field_policy)
            self.check_model(getattr(request, "model", None))
            return work(request)

        try:
            async with asyncio.timeout(min(self.config.request_timeout, self.config.token_timeout)):
                return await asyncio.get_running_loop().run_in_executor(threads, parsed)
        except TimeoutError:
            raise timed_out() from None
        finally:
            # Of a client that has left: the work may stay in the queue, and nobody counts the body any more.
            body = b""

    def _check_priority(self, request: ApiRequest, may_go_first: bool) -> None:
        """Raises ApiError (403) for a request that would go before others and may not."""
        if (request.priority or 0) < 0 and not may_go_first:
            self.metrics.http_refused.labels(reason="priority").inc()
            message = (
                f"priority: expected 0 or more, found {request.priority}: only clients that this server allows to go "
                "before others may ask for less than 0 (--priority-key-file or --allow-priority of the gateway)"
            )
            raise ApiError(403, message, param="priority", code="priority_not_allowed")

    async def whole(self, prepared: PreparedRequest, answer: Answer, held: HeldBytes) -> bytes:
        """The complete answers as JSON. Raises ApiError; then no other answer goes on."""
        per_token = 1 + (prepared.tokenized[0].generate.sampling.top_logprobs or 0)
        work = 0
        async with aclosing(self.deltas(prepared, held)) as deltas:
            async for index, some in deltas:
                for delta in some:
                    answer.keep(index, delta)
                    work += per_token * len(delta.tokens)
                    if work > _LOGPROBS_AT_ONCE:
                        # Others have their turn, however much has arrived.
                        work = 0
                        await asyncio.sleep(0)
        if held.held <= _SMALL_BYTES and prepared.request.requested_prompt_logprobs() is None:
            body = encode_json(answer.whole())
        else:
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._answers, lambda: encode_json(answer.whole()))
        held.settle(len(body))
        return body

    def deltas(
        self, prepared: PreparedRequest, held: HeldBytes, sink: DeltaSink | None = None
    ) -> AsyncGenerator[tuple[int, Sequence[Delta]], None]:
        """The deltas of all answers, with the number of the answer. Raises ApiError. Closing it cancels the request.

        held: counts deltas that nobody has taken yet. sink: takes deltas if there is one answer only.
        """
        count, per_prompt, text = len(prepared.tokenized), prepared.request.computed_choices, prepared.text
        shared: list[asyncio.Future[PromptLogprobTable] | None] = [None] * count
        if prepared.shares_prompt_logprobs:
            for start in range(0, count, per_prompt):
                shared[start : start + per_prompt] = [asyncio.get_running_loop().create_future()] * per_prompt
        only = sink if sink is not None and count == 1 else DeltaSink()
        choices = [
            ChoiceStream(request, ChoiceText(self.tokenizer.detokenizer(text.skipped), text), self.metrics, prompt)
            for request, prompt in zip(prepared.tokenized, shared, strict=True)
        ]
        return merged([choice.deltas(self.client, held, only) for choice in choices])

    def close(self) -> None:
        for threads in (self._small, self._large, self._answers):
            threads.shutdown(cancel_futures=True)
