"""How answers become JSON: a chunk that is made of the bytes of the one before equals one that is made anew."""

import copy
import json
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from control.messages import FinishReason, Generate, Token
from gateway.answers.chat import ChatAnswer
from gateway.answers.completions import CompletionAnswer
from gateway.answers.openai import OpenAIAnswer
from gateway.answers.responses import ResponseAnswer
from gateway.answers.streamed import Column, encode_json
from gateway.attempt import Delta
from gateway.detokenizer import TextOptions
from gateway.formats.families import ChatReading
from gateway.formats.tools import CallRules, ToolSet
from gateway.generation import TokenizedRequest
from gateway.preparer import ApiRequest, PreparedRequest
from gateway.requests.body import FieldPolicy
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest
from gateway.requests.responses import ResponsesRequest
from tests.gateway.formats.examples import TOOLS, parsing_format
from tests.gateway.world import held_answers

PIECES = [
    "Hel",
    "lo",
    "",
    ' "x" \\ \n\u2028',
    "é",
    "\U0001f600",
    "",
    "<",
    "b",
    "</th",
    "ink>",
    " ",
    "fin",
    "</think>",
    ".",
]
TOKENIZER: Any = SimpleNamespace(system_fingerprint="fp_1", piece=str)
HELD = held_answers().account()
FIELDS = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
]


def prepared(request: ApiRequest, reading: ChatReading | None = None) -> PreparedRequest:
    one = TokenizedRequest(
        Generate(request_id="r", prompt_ids=(1,), max_new_tokens=99), streams=True, arrived=0.0, deadline=9e9
    )
    return PreparedRequest(request, "r", (one, one), TextOptions(), request, reading)


def assert_same_bytes(answer: OpenAIAnswer[Any], pieces: Sequence[str]) -> None:
    """Both choices, each piece with a token of its own."""
    anew = copy.deepcopy(answer, {id(HELD): HELD})
    for number, piece in enumerate(pieces):
        finish_reason: FinishReason | None = "stop" if number == len(pieces) - 1 else None
        begin = sum(map(len, pieces[:number]))
        delta = Delta(piece, (Token(token_id=number),), (begin,), finish_reason, first=number == 0)
        for index in range(2):
            assert answer.encode_delta(index, delta) == anew.encode(anew.delta_events(index, delta)), (number, piece)
    assert answer.encode(answer.end()) == anew.encode(anew.end())


@pytest.mark.parametrize("fields", [*FIELDS, {"echo": True}])
def test_of_completions(fields: dict[str, object]) -> None:
    request = CompletionRequest.model_validate({"prompt": ["text of a choice", "b"], "stream": True, **fields})
    assert_same_bytes(CompletionAnswer(prepared(request), "text of a choice", TOKENIZER, HELD), PIECES)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("reasoning", [False, True])
def test_of_chats(reasoning: bool, tools: Sequence[dict[str, object]], fields: dict[str, object]) -> None:
    request = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "n": 2, "stream": True, **fields}
    )
    reading = ChatReading(parsing_format("glm"), CallRules(ToolSet(tools)), reasoning)
    answer = ChatAnswer(prepared(request, reading), "text of a choice", TOKENIZER, HELD)
    assert_same_bytes(answer, PIECES)


def response_answer(**fields: object) -> ResponseAnswer:
    body = ResponsesRequest.model_validate({"model": "m", "input": "a", "stream": True, **fields})
    reading = ChatReading(parsing_format("glm"), CallRules(ToolSet(())), False)
    of_one = replace(prepared(body.generation(FieldPolicy(strict=True)), reading), body=body)
    return ResponseAnswer(of_one, "m", TOKENIZER, HELD)


def test_a_response_repeats_large_schemas_without_copies_of_them() -> None:
    schema = {"enum": [[]] * 400_000, "const": None}
    tool = {"type": "function", "name": "f", "parameters": schema}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    answer = response_answer(tools=[tool], text={"format": form})
    tracemalloc.start()
    created, _ = answer.begin()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18, "a copy takes 3 MiB or more"
    response: Any = created["response"]
    assert response["tools"] == [{**tool, "description": None, "strict": None}]
    assert response["text"] == {"format": form, "verbosity": "medium"}


@pytest.mark.parametrize("piece", [" " * 64, "x" * 64], ids=["white space", "text"])
def test_a_token_of_a_long_answer_costs_no_more_than_one_of_a_short_one(piece: str) -> None:
    answer, times = response_answer(), []
    for _ in range(12):
        began = time.thread_time()
        for number in range(2000):
            answer.encode_delta(0, Delta(piece, (Token(token_id=number),), (0,), None))
        times.append(time.thread_time() - began)
    assert min(times[-3:]) < 4 * min(times[:3])


@pytest.mark.parametrize("number", [1, 2**70])
def test_columns_are_lists_of_their_document(number: int) -> None:
    column: Column[Any] = Column([1, "x"])
    column.append(Column())
    column.append(Column([None]))
    column.extend({"i": i} for i in range(3000))
    document = {"a": Column(), "number": number, "b": [column, {"c": Column([""])}]}
    expected = {"a": [], "number": number, "b": [[1, "x", None, *({"i": i} for i in range(3000))], {"c": [""]}]}
    assert json.loads(encode_json(document)) == expected
