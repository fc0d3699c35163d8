"""A chunk that is made of the bytes of the one before equals one that is made anew."""

import copy
from collections.abc import Sequence

import pytest

from control.messages import FinishReason, Generate, Token
from gateway.answers.answer import Answer
from gateway.answers.chat import ChatAnswer
from gateway.answers.completions import CompletionAnswer
from gateway.attempt import TokenizedRequest
from gateway.choice import Delta, TextOptions
from gateway.formats import ToolSet
from gateway.prepared import ApiRequest, ChatReading, Prepared
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest
from tests.gateway.formats.examples import TOOLS, parsing_format

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
FIELDS = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
]


def prepared(request: ApiRequest, reading: ChatReading | None = None) -> Prepared:
    one = TokenizedRequest(
        Generate(request_id="r", prompt_ids=(1,), max_new_tokens=99), streams=True, arrived=0.0, deadline=9e9
    )
    return Prepared(request, "r", (one, one), TextOptions(), reading)


def assert_same_bytes(answer: Answer, pieces: Sequence[str]) -> None:
    """Both choices, each piece with a token of its own."""
    anew = copy.deepcopy(answer)
    for number, piece in enumerate(pieces):
        finish_reason: FinishReason | None = "stop" if number == len(pieces) - 1 else None
        delta = Delta(piece, (Token(token_id=number),), (0,), finish_reason, first=number == 0)
        for index in range(2):
            assert answer.written(index, delta) == anew.lines(anew.more(index, delta)), (number, piece)
    assert answer.lines(answer.end()) == anew.lines(anew.end())


@pytest.mark.parametrize("fields", [*FIELDS, {"echo": True}])
def test_of_completions(fields: dict[str, object]) -> None:
    request = CompletionRequest.model_validate({"prompt": ["text of a choice", "b"], "stream": True, **fields})
    assert_same_bytes(CompletionAnswer(prepared(request), "text of a choice", None), PIECES)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("reasoning", [False, True])
def test_of_chats(reasoning: bool, tools: Sequence[dict[str, object]], fields: dict[str, object]) -> None:
    request = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "n": 2, "stream": True, **fields}
    )
    reading = ChatReading(parsing_format("glm"), ToolSet(tools), reasoning)
    answer = ChatAnswer(prepared(request, reading), "text of a choice", None)  # type: ignore[arg-type]
    assert_same_bytes(answer, PIECES)
