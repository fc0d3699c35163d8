"""/v1/responses/compact: a summary of a conversation, and the item that stands for it afterwards."""

import base64
from typing import Any

import httpx
import pytest

from gateway.requests.response_input import encoded_summary
from tests.gateway.world import LONG_CONTEXT, MODEL, World

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it in Rome?"},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
    {"type": "function_call_output", "call_id": "c", "output": "sun"},
    {"role": "assistant", "content": "Sunny."},
]


def compacted(world: World, **fields: Any) -> httpx.Response:
    return world.http.post("/v1/responses/compact", json={"model": MODEL, "input": CONVERSATION, **fields})


def test_openai_client_goes_on_with_the_summary(glm: World) -> None:
    glm.says("Let me see.</think>Rome is sunny, ü.")
    made = glm.client.responses.compact(model=MODEL, input=CONVERSATION, instructions="Be brief.")  # type: ignore[arg-type]
    assert glm.prompt.startswith("<|system|>Be brief.<|user|>How is it in Rome?<|assistant|><tool_call>weather")
    assert "Sunny.<|user|>Summarise the conversation" in glm.prompt
    assert (made.object, made.usage.output_tokens_details.reasoning_tokens > 0) == ("response.compaction", True)
    [item] = made.output
    assert item.type == "compaction"
    assert base64.b64decode(item.encrypted_content).decode().endswith("\nRome is sunny, ü.")
    glm.says("</think>Yes.")
    question = {"role": "user", "content": "Still?"}
    answer = glm.client.responses.create(model=MODEL, input=[item.model_dump(), question])
    assert answer.output_text == "Yes."
    assert glm.prompt == (
        "<|user|>A summary of the conversation until here:\n\nRome is sunny, ü.<|user|>Still?<|assistant|><think>"
    )


def test_a_summary_is_bounded_and_may_fill_what_the_context_leaves(glm: World) -> None:
    glm.says("</think>ok")
    assert compacted(glm).status_code == 200
    assert glm.decode.generated[-1].max_new_tokens == 8192
    room = 100
    assert compacted(glm, input="x" * (LONG_CONTEXT - 600)).status_code == 200
    assert room < glm.decode.generated[-1].max_new_tokens < 600


@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_the_output_of_a_call_may_follow_the_summary_that_has_the_call(
    family: str, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(family)
    world.says("</think>ok")
    item = {"type": "compaction", "encrypted_content": encoded_summary("The weather was asked for.")}
    output = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    answer = world.http.post("/v1/responses", json={"model": MODEL, "input": [item, output]})
    assert answer.status_code == 200, answer.text
    assert world.prompt.count("The result of the call c:\n\nsun") == 1


def test_a_model_that_writes_no_summary_is_an_error(glm: World) -> None:
    glm.says_until_cut_off("I never end")
    answer = compacted(glm)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_summary")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": "other"}, "model"),
        ({"input": None}, "input"),
        ({"stream": True}, "stream"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "function", "name": "a"}]}, "tools"),
        ({"input": [{"type": "compaction"}]}, "input.0.encrypted_content"),
        ({"input": "x" * LONG_CONTEXT}, "input"),
    ],
)
def test_what_cannot_be_compacted_is_refused_by_name(glm: World, fields: dict[str, Any], param: str) -> None:
    answer = compacted(glm, **fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


NO_TEXT = base64.b64encode(base64.b64decode(encoded_summary("")) + b"\xff").decode()


@pytest.mark.parametrize(
    "content",
    ["", "gAAAAABpM0Yj", "not base64!", base64.b64encode(b"x").decode(), encoded_summary("ab")[:-6], NO_TEXT, 3],
)
def test_what_no_gateway_has_made_is_no_compaction(glm: World, content: object) -> None:
    item = {"type": "compaction", "encrypted_content": content}
    answer = glm.http.post("/v1/responses", json={"model": MODEL, "input": [item]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.0.encrypted_content")
