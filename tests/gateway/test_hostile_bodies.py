"""Bodies and frames with as many wrong values as fit. Each costs little, and the clients beside it nothing."""

import asyncio
import gc
import inspect
import json
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

import control.messages
import gateway.server
from base.wire import MAX_ERRORS, FailFastModel, first_error
from control.grammar import Regex
from gateway.completer import Completer
from gateway.requests.body import FieldPolicy, parse
from gateway.requests.chat import ConvertedRequest
from gateway.requests.completions import CompletionRequest
from gateway.requests.messages import MessagesRequest
from gateway.requests.responses import ResponsesRequest
from tests.gateway.world import QUESTION, World

MODULES = (control.messages, gateway.server)
"""Import all models."""
COUNT = 80_000
WRONG = [0] * COUNT
MOST_BYTES = 32 << 20
"""Of Python objects, for a body of at most a megabyte. One error per element takes twice as many."""
CHAT = {"messages": [QUESTION], "max_tokens": 1}
INPUT = {"input": "hello"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/chat/completions", {"messages": WRONG}),
    "tool_calls": ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": WRONG}]}),
    "content": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WRONG}]}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": WRONG}),
    "guided_choice": ("/v1/chat/completions", {**CHAT, "guided_choice": WRONG}),
    "structured_outputs": ("/v1/chat/completions", {**CHAT, "structured_outputs": {"choice": WRONG}}),
    "logit_bias": ("/v1/chat/completions", {**CHAT, "logit_bias": {str(i): "" for i in range(COUNT)}}),
    "template": ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {f"a{i}": [] for i in range(COUNT)}}),
    "stop": ("/v1/completions", {"prompt": "a", "stop": WRONG}),
    "bad_words": ("/v1/completions", {"prompt": "a", "bad_words": WRONG}),
    "prompt": ("/v1/completions", {"prompt": [""] * COUNT}),
    "input": ("/v1/responses", {"input": WRONG}),
    "metadata": ("/v1/responses", {**INPUT, "metadata": {str(i): 0 for i in range(COUNT)}}),
    "blocks": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": WRONG}]}),
    "stop_sequences": ("/v1/messages", {"max_tokens": 1, "messages": [QUESTION], "stop_sequences": WRONG}),
    "tokens": ("/detokenize", {"tokens": [""] * COUNT}),
}


@pytest.fixture
def _counted() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("_counted")
@pytest.mark.parametrize("body", BODIES)
def test_a_body_of_wrong_elements_costs_an_honest_client_nothing(body: str, deepseek: World) -> None:
    deepseek.says("</think>Sunny.")
    path, fields = BODIES[body]
    content = json.dumps(fields, separators=(",", ":"))
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with ThreadPoolExecutor() as clients:
        answer = clients.submit(deepseek.chat, QUESTION)
        refused = clients.submit(httpx.post, f"{deepseek.gateway.url}{path}", content=content, timeout=60).result()
        assert "Sunny." in answer.result().choices[0].message.content
    assert refused.status_code == 400, refused.text
    assert len(refused.text) < 1000
    assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES


def models(base: type[FailFastModel] = FailFastModel) -> Iterator[type[FailFastModel]]:
    for model in base.__subclasses__():
        yield model
        yield from models(model)


MODELS = [
    model
    for model in sorted(set(models()), key=lambda model: (model.__module__, model.__qualname__))
    if model.__module__.startswith(("gateway.", "control.", "transfer.")) and not inspect.isabstract(model)
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_list_or_object_is_validated_up_to_its_first_error(model: type[FailFastModel]) -> None:
    many: tuple[list[object], ...] = [0.5] * 1000, [[]] * 1000
    values = [
        value
        for some in many
        for value in (some, tuple(some), (some,), (tuple(some),), {str(i): x for i, x in enumerate(some)})
    ]
    for name, field in model.model_fields.items():
        for value in values:
            try:
                model.model_validate({field.alias or name: value})
            except ValidationError as error:
                kinds = Counter(found["type"] for found in error.errors())
                # Fields that are not declared: only a node with a valid key sends them, and `first_error` counts them.
                del kinds["extra_forbidden"]
                assert kinds.total() < 100, name


def test_the_body_of_a_client_that_has_left_waits_for_no_thread() -> None:
    """As many bodies as clients can send could wait, and none of them counts."""
    began, ends = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: began.set() or ends.wait())
        began.wait()
        gateway: Any = SimpleNamespace(
            _small=threads, _large=threads, config=SimpleNamespace(request_timeout=60.0, token_timeout=60.0)
        )
        body = b"x" * 1000
        held = sys.getrefcount(body)

        async def leave() -> None:
            reading = asyncio.create_task(Completer.read(gateway, body, CompletionRequest, lambda request: request))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])

        asyncio.run(leave())
        gc.collect()
        waiting = threads._work_queue.qsize()
        found = sys.getrefcount(body)
        ends.set()
    assert (waiting, found) == (1, held)


def test_of_many_errors_only_their_number_is_told() -> None:
    fields = {str(i): 0 for i in range(1 + MAX_ERRORS)}
    with pytest.raises(ValidationError) as refused:
        Regex.model_validate({"pattern": "a", **fields})
    assert first_error(refused.value)["msg"] == f"{len(fields)} values are not as expected"


SAID = {"role": "assistant", "content": "a" * 30}
CALL = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
TEXT = {"type": "text", "text": "a" * 30}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MessagesRequest, {"messages": [{"role": "user", "content": [TEXT] * 40_000}], "max_tokens": 1}),
        (ResponsesRequest, {"input": [{"role": "user", "content": "a"}, CALL, *[SAID] * 40_000]}),
    ],
)
def test_many_pieces_of_a_message_are_put_together_once(kind: type[ConvertedRequest], fields: dict[str, Any]) -> None:
    policy = FieldPolicy(strict=False)
    request = parse(kind, json.dumps(fields).encode(), policy)
    began = time.thread_time()
    *_, last = request.generation(policy).messages  # type: ignore[attr-defined]
    assert time.thread_time() - began < 0.5, "one by one, it takes 1.2 s, and four times as long for twice as many"
    assert len(last.content) == 40_000 * 31 - 1
