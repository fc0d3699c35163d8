"""From a request's body to a stream of deltas: parse, tokenize, check lengths, generate, count."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from pydantic import ValidationError

from base.errors import StartupError
from base.metrics import Metrics
from control.block_hashes import BlockHasher
from control.grammar import Grammar, Lark
from gateway.attempt import Shortcut, TokenizedRequest
from gateway.branch import Branch
from gateway.choice import Delta, TextOptions
from gateway.config import GatewayConfig
from gateway.decode_client import DecodeClient
from gateway.errors import ApiError, timed_out
from gateway.formats import ChatFormat, FormatError, choose_format
from gateway.merging import merged
from gateway.prepared import ApiRequest, ChatReading, Prepared
from gateway.registry import Capacity, NodeRegistry
from gateway.requests.body import RequestBody, parse
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest, Prompt
from gateway.requests.conversion import ConvertedRequest
from gateway.requests.unsupported import FieldPolicy
from gateway.salts import salt_of
from gateway.tokenizer import CheckpointTokenizer

_SMALL_BYTES = 64 << 10
_THREADS = 2
"""Threads for small requests, and the same number for large ones."""

_Body = TypeVar("_Body", bound=RequestBody)
_Result = TypeVar("_Result")


class Completer:
    """Turns requests into answers. Belongs to the gateway's event loop.

    Threads parse and tokenize. Large requests have threads of their own, since one may take as long as thousands of
    small ones.
    """

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: CheckpointTokenizer,
        chat_format: ChatFormat | None,
        client: DecodeClient,
        registry: NodeRegistry,
        metrics: Metrics,
        context_length: int,
        block_hasher: BlockHasher | None,
    ) -> None:
        """chat_format: how chats are written; None if the checkpoint knows none. block_hasher: for routing to where
        prefixes are cached; None if routing does not look at that."""
        self.model = config.model_name
        self.tokenizer = tokenizer
        self._client = client
        self._registry = registry
        self._metrics = metrics
        self.context_length = context_length
        self._request_timeout = config.request_timeout
        self._prefix_cache_per_key = config.prefix_cache_per_key
        self._block_hasher = block_hasher
        self._fields = FieldPolicy(config.strict_fields)
        self.chat_format = chat_format
        self._small = ThreadPoolExecutor(_THREADS, thread_name_prefix="small")
        self._large = ThreadPoolExecutor(_THREADS, thread_name_prefix="large")

    @property
    def capacity(self) -> Capacity:
        """The largest request that can be served now."""
        return self._registry.capacity(self.context_length, time.monotonic())

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) for a model that is not served. None stands for the one that is."""
        if model is not None and model != self.model:
            message = f"the model {model!r} does not exist; this server serves {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def prepare(
        self, body: bytes, kind: type[ApiRequest] | type[ConvertedRequest], client_key: bytes
    ) -> Prepared:
        """Parse, check and tokenize a request. Raises ApiError (504 if that takes longer than a request may).

        client_key: the API key of its client, empty if it has none.
        """
        arrived = time.monotonic()
        salt_key = client_key if self._prefix_cache_per_key else None
        capacity = self.capacity

        def prepared(request: ApiRequest | ConvertedRequest) -> Prepared:
            if not isinstance(request, ConvertedRequest):
                name = "cmpl-" if isinstance(request, CompletionRequest) else "chatcmpl-"
                return self._prepared(request, name, capacity, arrived, salt_key)
            with request.renaming():
                chat = self.chat_of(request)
                return replace(self._prepared(chat, request.id_prefix, capacity, arrived, salt_key), source=request)

        return await self.read(body, kind, prepared)

    async def read(self, body: bytes, kind: type[_Body], work: Callable[[_Body], _Result]) -> _Result:
        """What `work` makes of a body, on a thread. Raises ApiError (504 if that takes longer than a request may)."""
        threads = self._small if len(body) <= _SMALL_BYTES else self._large

        def parsed() -> _Result:
            request = parse(kind, body, self._fields)
            self.check_model(getattr(request, "model", None))
            return work(request)

        try:
            async with asyncio.timeout(self._request_timeout):
                return await asyncio.get_running_loop().run_in_executor(threads, parsed)
        except TimeoutError:
            raise timed_out() from None

    def chat_of(self, request: ConvertedRequest) -> ChatCompletionRequest:
        """The chat completion that a request asks for. Raises ApiError."""
        return request.as_chat(self._fields)

    async def whole(self, prepared: Prepared) -> list[list[Delta]]:
        """The complete answers, each from one node. Raises ApiError; then no other answer goes on."""
        answers: list[list[Delta]] = [[] for _ in prepared.branches]
        async with aclosing(self.deltas(prepared)) as deltas:
            async for index, some in deltas:
                for delta in some:
                    if delta.first:
                        answers[index].clear()
                    answers[index].append(delta)
        return answers

    def deltas(
        self, prepared: Prepared, shortcut: Shortcut | None = None
    ) -> AsyncGenerator[tuple[int, Sequence[Delta]], None]:
        """The answers: an index, and what this answer goes on with. Raises ApiError.

        Closing it early cancels the request. shortcut: where deltas may go instead if there is one answer only.
        """
        alone = len(prepared.branches) == 1
        way = shortcut if shortcut is not None and alone else Shortcut()
        branches = [Branch(prepared, number, self.tokenizer, self._metrics) for number in range(len(prepared.branches))]
        return merged([branch.deltas(self._client, way) for branch in branches])

    def close(self) -> None:
        for threads in (self._small, self._large):
            threads.shutdown(cancel_futures=True)

    def _prepared(
        self, request: ApiRequest, id_prefix: str, capacity: Capacity, arrived: float, salt_key: bytes | None
    ) -> Prepared:
        request_id = f"{id_prefix}{uuid.uuid4().hex}"
        own_stops = () if request.ignore_eos else self.tokenizer.stop_token_ids
        stop_token_ids = (*own_stops, *(request.stop_token_ids or ()))
        sampling = request.sampling(self.tokenizer)
        reading = None
        if isinstance(request, ChatCompletionRequest):
            token_ids, reading = self.chat_prompt(request)
            prompts = [token_ids]
        else:
            prompts = [self._prompt_ids(request, prompt, capacity) for prompt in request.prompt]
        prompts = [request.truncated(token_ids, capacity.context) for token_ids in prompts]
        if not all(prompts):
            raise ApiError(400, "the prompt has no tokens: expected at least one", param=request.prompt_field)
        grammar = _grammar(request, reading, self.tokenizer.added_ids)
        request.check_prompt_logprobs(sum(map(len, prompts)))
        lengths = [request.max_new_tokens(len(prompt_ids), capacity) for prompt_ids in prompts]
        salt = salt_of(request.cache_salt, salt_key)
        named = [None if self._block_hasher is None else self._block_hasher(prompt, salt) for prompt in prompts]
        prompt_logprobs = request.requested_prompt_logprobs()
        # Each choice that reports log probabilities of the prompt has them computed for itself.
        shares_prompt = request.computed_choices > 1 and prompt_logprobs is None
        several = len(prompts) * request.computed_choices > 1
        branches = tuple(
            TokenizedRequest(
                request_id=f"{request_id}-{number * request.computed_choices + choice}" if several else request_id,
                prompt_ids=tuple(prompt_ids),
                max_new_tokens=max_new_tokens,
                sampling=sampling.model_copy(update={"seed": (sampling.seed + choice) % 2**63}),
                stop_token_ids=stop_token_ids,
                streams=bool(request.stream),
                arrived=arrived,
                deadline=arrived + self._request_timeout,
                priority=request.priority or 0,
                grammar=grammar,
                group=f"{request_id}-{number}" if shares_prompt else "",
                prompt_logprobs=prompt_logprobs,
                cache_salt=salt,
                block_hashes=hashes,
            )
            for number, (prompt_ids, max_new_tokens, hashes) in enumerate(zip(prompts, lengths, named, strict=True))
            for choice in range(request.computed_choices)
        )
        skipped = self.tokenizer.special_ids
        if request.skip_special_tokens is False:
            skipped = frozenset()
        elif reading is not None:
            skipped -= self.tokenizer.special_ids_of(reading.format.markers)
        text = TextOptions(
            stops=(*request.stop, *(reading.format.stop_strings if reading else ())),
            stop_token_ids=frozenset(stop_token_ids),
            includes_stop=bool(request.include_stop_str_in_output),
            min_tokens=request.min_tokens or 0,
            skipped=skipped,
            prompt_only=request.prompt_only,
        )
        return Prepared(request, request_id, branches, text, reading)

    def chat_prompt(
        self, request: ChatCompletionRequest, special_tokens: bool = False
    ) -> tuple[list[int], ChatReading]:
        """The token ids of a conversation, and how the answers to it are taken apart. Raises ApiError.

        special_tokens: those that the tokenizer puts in front of a text come in front of what the format writes.
        """
        if self.chat_format is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        tools = request.usable_tools
        try:
            prompt = self.chat_format.render(
                [message.rendered() for message in request.messages],
                tools,
                thinking=request.thinking,
                variables=request.chat_template_kwargs or {},
            )
        except FormatError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        token_ids = self.tokenizer.encode(prompt.text, special_tokens=special_tokens)
        return token_ids, ChatReading(self.chat_format, tools, prompt.reasoning)

    def _prompt_ids(self, request: CompletionRequest, prompt: Prompt, capacity: Capacity) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special_tokens=True)
        # Refuse one that is too long before looking at each id.
        request.max_new_tokens(len(request.truncated(prompt, capacity.context)), capacity)
        limit = self.tokenizer.vocab_size
        for position, token_id in enumerate(prompt):
            if not 0 <= token_id < limit:
                found = f"found {token_id} at position {position}"
                raise ApiError(400, f"prompt: expected token ids from 0 to {limit - 1}, {found}", param="prompt")
        return prompt


def _grammar(request: ApiRequest, reading: ChatReading | None, added_ids: Mapping[str, int]) -> Grammar | None:
    """What the answers have to look like. Behind reasoning, if they begin with it. Raises ApiError.

    added_ids: the tokenizer's added tokens, by their text.
    """
    structure = request.structure()
    after = reading.format.end_of_reasoning if reading is not None and reading.reasoning else None
    if isinstance(request, ChatCompletionRequest) and (tools := request.required_tools):
        if structure is not None:
            raise ApiError(400, "tool_choice: a required call has no other structure", param="tool_choice")
        assert reading is not None
        parallel = request.parallel_tool_calls is not False
        calls = reading.format.call_grammar(tools, parallel=parallel, token_ids=added_ids)
        if calls is None:
            raise ApiError(400, "tool_choice: this model's format has no tool calls", param="tool_choice")
        structure = Lark(grammar=calls)
    try:
        return None if structure is None else Grammar(root=structure, after=after)
    except ValidationError as error:
        raise ApiError(400, f"the structure of the answer: {error.errors()[0]['msg']}") from error


def chat_format_of(config: GatewayConfig, tokenizer: CheckpointTokenizer) -> ChatFormat | None:
    """How chats are written; None if the checkpoint knows none. Raises StartupError for a parser that does not fit."""
    try:
        return choose_format(
            tokenizer.model_type,
            template=tokenizer.chat_template,
            apply=tokenizer.apply_chat_template,
            call_parser=None if config.tool_call_parser == "auto" else config.tool_call_parser,
            parse_reasoning=config.reasoning_parser == "auto",
        )
    except ValueError as error:
        raise StartupError(f"--tool-call-parser {config.tool_call_parser}: {error}") from error
