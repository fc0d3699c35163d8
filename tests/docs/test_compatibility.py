"""The README's table of what is supported says what the code and OpenAI's own client say."""

import re

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from gateway.openapi import document
from gateway.requests.body import NEUTRAL
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest
from tests.docs.tables import readme_rows

ROWS = readme_rows("compatibility")[1:]
OURS = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
OPENAI = {
    *completion_create_params.CompletionCreateParamsBase.__annotations__,
    *chat_create_params.CompletionCreateParamsBase.__annotations__,
}
INPUT = {"model", "prompt", "messages", "stream"}


def names(row: list[str]) -> set[str]:
    return set(re.findall(r"`([^`]+)`", row[0]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_is_true_of_this_project_and_of_openai(row: list[str]) -> None:
    paths = {name for name in names(row) if name.startswith("/")}
    fields = names(row) - paths
    here, openai, *_ = (cell.partition(",")[0] for cell in row[1:])
    assert {cell.partition(",")[0] for cell in row[1:]} <= {"yes", "no"}
    if here == "yes":
        assert paths <= document()["paths"].keys()
        assert fields <= OURS
    else:
        assert not fields & OURS
        assert fields <= NEUTRAL.keys(), "a field that changes the text is refused"
    assert (fields <= OPENAI) if openai == "yes" else not (fields & OPENAI)


def test_every_field_is_in_a_row() -> None:
    assert OURS - INPUT - {name for row in ROWS for name in names(row)} == set()
