"""Tools whose schemas are made to cost as much as possible. Each costs the client that sends it, and nobody else."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.gateway.world import QUESTION, World, dsml_call, dsml_calls, glm_call

SELF = {"$ref": "#/$defs/d"}


def weather(properties: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    return {"type": "function", "function": {"name": "weather", "parameters": parameters}}


RECURSIVE = weather({"city": SELF}, {"d": {"anyOf": [SELF] * 40}})
"""1 KB, of which each level of references is 40 times the one before."""
TOO_LONG = weather(
    {f"a{number}": {"type": "array"} for number in range(2000)}, {f"d{number}": {} for number in range(4000)}
)
"""Schemas of which a grammar would have 100 million characters."""


def beside(service: World, hostile: dict[str, Any]) -> tuple[Future[Any], list[Future[Any]]]:
    """The answer to an honest client while as many hostile ones ask as there are threads, and the answers to these."""
    with ThreadPoolExecutor(5) as clients:
        theirs = [clients.submit(service.chat, QUESTION, **hostile) for _ in range(4)]
        return clients.submit(service.chat, QUESTION), theirs


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_a_schema_that_refers_to_itself_costs_nobody(family: str, choice: str, request: pytest.FixtureRequest) -> None:
    service: World = request.getfixturevalue(family)
    service.says(dsml_calls(dsml_call("Rome")) if family == "deepseek" else "</think>" + glm_call("Rome"))
    mine, theirs = beside(service, {"tools": [RECURSIVE], "tool_choice": choice})
    for answer in (mine, *theirs):
        (call,) = answer.result().choices[0].message.tool_calls
        assert call.function.arguments == '{"city": "Rome"}'


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_a_grammar_that_is_too_long_is_refused(family: str, request: pytest.FixtureRequest) -> None:
    service: World = request.getfixturevalue(family)
    service.says("</think>Sunny.")
    mine, theirs = beside(service, {"tools": [TOO_LONG], "tool_choice": "required"})
    assert "Sunny." in mine.result().choices[0].message.content
    for answer in theirs:
        with pytest.raises(openai.BadRequestError, match="65536 characters: 'weather'") as refused:
            answer.result()
        assert refused.value.param == "tools"
